"""BLIP-2 (Li et al., 2023): the rows of a Q-Former before a prompt. Its encoder and decoder are transformers' code."""

from services.families.family import Family

FAMILY = Family(
    architectures=("Blip2ForConditionalGeneration",),
    prompt="services.families.blip2.prompt:Blip2Rule",
    encoder="services.families.blip2.generic:Blip2Encoder",
    encoder_tensors=("vision_model", "qformer", "query_tokens", "language_projection"),
    sizes="services.families.blip2.sizes:largest",
    template="services.families.blip2.template:chat_template",
    overrides={"decoder_path": "language_model"},
)
