"""Chameleon (Meta, 2024): pictures as codes of the vocabulary, by the code of transformers. Here it draws none."""

from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family

FAMILY = Family(
    architectures=("ChameleonForConditionalGeneration",),
    prompt=GENERIC_PROMPT,
    encoder=GENERIC_ENCODER,
    encoder_tensors=("vqmodel",),
    sizes="services.families.chameleon.sizes:largest",
    template="services.families.chameleon.prompt:chat_template",
    overrides={
        "encoder_path": "model.vqmodel",
        "finish": "services.families.chameleon.prompt:finish",
    },
)
