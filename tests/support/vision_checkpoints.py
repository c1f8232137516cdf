"""LLaVA folders for the services before the decoder: their templates, and the files of other versions."""

import json
from pathlib import Path
from typing import Any

from tests.support.checkpoints import make_checkpoint, respell

# One loop over parts, as llava-hf writes it.
PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRING_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_LEN = 256


_TEXT = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": MAX_LEN}
_VISION = {"intermediate_size": 64, "num_attention_heads": 2}


def llava_checkpoint(
    folder: Path,
    tower: str = "clip",
    template: str = PARTS_TEMPLATE,
    vision_changes: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A LLaVA folder with a "clip" (4x4 patches and a class token) or "siglip" (3x3 patches) tower."""
    vision = {**_VISION, "num_hidden_layers": 4 if tower == "clip" else 3, **(vision_changes or {})}
    side = vision.get("image_size", 48)
    # LlavaProcessor reads the output's size from here where it computes without an image.
    images = {"crop_size": {"height": side, "width": side}} if tower == "siglip" else {}
    return make_checkpoint(
        folder,
        "llava",
        tower=tower,
        template=template,
        text=_TEXT,
        vision=vision,
        images=images,
        config={"vision_feature_layer": -2, **config},
    )


def llama_checkpoint(folder: Path, template: str = STRING_TEMPLATE) -> Path:
    """A text-only folder."""
    return make_checkpoint(folder, "llama", template=template, text=_TEXT)


def like_older_versions(folder: Path) -> Path:
    """Rewrites the folder as transformers 4.36 would have: old names, old files, old spellings."""
    combined = json.loads((folder / "processor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(combined["image_processor"]))
    (folder / "processor_config.json").unlink()
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return respell(folder, "llava", "old")


def like_newer_versions(folder: Path) -> Path:
    """Rewrites the tensor names to those below one `model.`, as the module tree has them."""
    return respell(folder, "llava", "new")
