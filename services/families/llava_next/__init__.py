"""LLaVA-NeXT (Liu et al., 2024): LLaVA whose pictures are shown as several squares."""

from services.families.family import Family

FAMILY = Family(
    architectures=("LlavaNextForConditionalGeneration",),
    prompt="services.families.llava_next.prompt:LlavaNextRule",
    encoder="services.families.llava_next.encoder:LlavaNextEncoder",
    encoder_tensors=("vision_tower", "multi_modal_projector", "image_newline"),
    sizes="services.families.llava_next.sizes:largest",
)
