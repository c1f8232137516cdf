"""Molmo (Deitke et al., 2024): pictures whole and as overlapping crops, added to the embeddings of their tokens."""

from services.families.family import Family

FAMILY = Family(
    architectures=("MolmoForCausalLM",),
    text_types=("molmo",),
    prompt="services.families.molmo.prompt:MolmoRule",
    encoder="services.families.molmo.encoder:MolmoEncoder",
    decoder="services.families.molmo.decoder:Molmo",
    encoder_tensors=("vision_backbone",),
    config="services.families.molmo.config:read",
    processor="services.families.molmo.sizes:processor",
    template="services.families.molmo.template:chat_template",
    template_first=True,
    sizes="services.families.molmo.sizes:largest",
)
