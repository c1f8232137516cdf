"""ChatGLM-6B (Du et al., 2022; Zeng et al., 2023): a prompt that sees itself whole, two positions a token."""

from services.families.family import Family

FAMILY = Family(
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    text_types=("chatglm",),
    config_keys=("inner_hidden_size",),
    decoder="services.families.chatglm_6b.decoder:ChatGLM6B",
    config="services.families.chatglm_6b.config:read",
    template="services.families.chatglm_6b.template:chat_template",
    clean_up="services.families.chatglm_6b.template:clean_up",
)
