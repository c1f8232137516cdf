"""Llama 3.2 Vision (Meta, 2024): some layers attend to pictures, whose tokens take no rows. Prompt and tower are
transformers', the decoder is ours."""

from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family

FAMILY = Family(
    architectures=("MllamaForConditionalGeneration",),
    text_types=("mllama_text_model",),
    prompt=GENERIC_PROMPT,
    encoder=GENERIC_ENCODER,
    decoder="services.families.mllama.decoder:Mllama",
    encoder_tensors=("vision_model", "multi_modal_projector"),
    config="services.families.mllama.config:read",
    sizes="services.families.mllama.sizes:largest",
    overrides={
        "finish": "services.families.mllama.prompt:finish",
        "features": "services.families.mllama.generic:features",
        "item_rows": "services.families.mllama.sizes:item_rows",
    },
)
