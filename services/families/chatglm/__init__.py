"""ChatGLM2, ChatGLM3 and GLM-4-9B in their first layout: GLM's block under other names."""

from services.families.family import Family

FAMILY = Family(
    architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    text_types=("chatglm",),
    decoder="services.families.chatglm.decoder:ChatGLM",
    config="services.families.chatglm.config:read",
    template="services.families.chatglm.template:chat_template",
    clean_up="services.families.chatglm.template:clean_up",
    stops="services.families.chatglm.template:stops",
)
