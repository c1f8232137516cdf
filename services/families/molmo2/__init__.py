"""Molmo2 (Ai2, 2025): a picture and overlapping crops of it, whose tokens see each other. The code is transformers'."""

from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family

FAMILY = Family(
    architectures=("Molmo2ForConditionalGeneration",),
    prompt=GENERIC_PROMPT,
    encoder=GENERIC_ENCODER,
    encoder_tensors=("vision_tower", "multi_modal_projector", "vision_backbone"),
    processor="services.families.molmo2.sizes:processor",
    sizes="services.families.molmo2.sizes:largest",
    overrides={
        "finish": "services.families.molmo2.prompt:finish",
        "features": "services.families.molmo2.generic:features",
        "merge": "add",
        # The tokens of all pictures of a prompt see each other, those of later ones too: that is not served.
        "most_images": "1",
        # Its separators are among them: they take rows of zeros, so that all of them are one span.
        "rows": "all",
    },
)
