"""LLaVA 1.5 (Liu et al., 2023): a CLIP or SigLIP tower before any decoder."""

from services.families.family import Family

FAMILY = Family(
    architectures=("LlavaForConditionalGeneration",),
    prompt="services.families.llava.prompt:LlavaRule",
    encoder="services.families.llava.encoder:LlavaEncoder",
    encoder_tensors=("vision_tower", "multi_modal_projector"),
    sizes="services.families.llava.sizes:largest",
)
