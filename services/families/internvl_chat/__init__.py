"""InternVL 1.5 to 3.5 in its own layout (Chen et al., 2024): pictures as tiles of one size, before any decoder."""

from services.families.family import Family

FAMILY = Family(
    architectures=("InternVLChatModel",),
    prompt="services.families.internvl_chat.prompt:InternVLRule",
    encoder="services.families.internvl_chat.encoder:InternVLEncoder",
    encoder_tensors=("vision_model", "mlp1"),
    sizes="services.families.internvl_chat.sizes:largest",
    processor="services.families.internvl_chat.sizes:processor",
    template="services.families.internvl_chat.template:chat_template",
    template_first=True,
    stops="services.families.internvl_chat.template:stops",
)
