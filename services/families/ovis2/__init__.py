"""Ovis2 (AIDC, 2025): pictures as mixtures of a table's rows, between tokens of that table, by transformers' code."""

from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family

FAMILY = Family(
    architectures=("Ovis2ForConditionalGeneration",),
    prompt=GENERIC_PROMPT,
    encoder=GENERIC_ENCODER,
    encoder_tensors=("vision_tower", "visual_embeddings_table"),
    sizes="services.families.generic_media:largest",
    overrides={
        "features": "services.families.ovis2.generic:features",
        # The indicator tokens between its tiles have embeddings of their own there.
        "rows": "all",
    },
)
