"""A small random checkpoint of any type of transformers that takes pictures, made of what its own files say of it."""

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from services.comparison.small_config import smaller
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import build_processor, run_processor
from tests.support.checkpoints.options import randomise
from tests.support.tokenizers import SPECIAL, byte_level_tokenizer

TYPES = tuple(sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
# Types that transformers registers under their processor's name alone, or not at all.
_PROCESSORS = {"glm_ocr": "Glm46VProcessor", "glmga": "Glm46VProcessor"}
_IMAGES = {"glm4v_moe": "Glm4vImageProcessor", "qwen3_vl_moe": "Qwen2VLImageProcessor",
           "glm_ocr": "Glm46VImageProcessor"}  # fmt: skip
_TEMPLATE = (
    "{{% for message in messages %}}{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{marker} and {{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endfor %}}"
)
_TOKEN = re.compile(r"""["'](<[^"'<>\s{}]+>|\[[A-Z_]+\])["']""")
_NAMED = re.compile(r"tokenizer\.(\w+_token)\b")
_USUAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
          "unk_token": "<|endoftext|>"}  # fmt: skip


def build(folder: Path, kind: str) -> Path:
    """Writes it. Raises whatever transformers does about a configuration that is not whole by itself."""
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    model_class: Any = getattr(transformers, name)
    source = _processor_source(kind)
    words = _tokenizer(source)
    config = _config(kind, model_class, words)
    images = _image_processor(kind, config)
    folder.mkdir(parents=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    found = _PROCESSORS.get(kind) or PROCESSOR_MAPPING_NAMES.get(kind)
    settings = {**_settings(source, config), **_OF_PROCESSORS.get(kind, {})}
    if found:
        written = {"processor_class": found, **settings}
        (folder / "processor_config.json").write_text(json.dumps(written))
    marker = _MARKERS.get(kind, "<image>")
    words.chat_template = _TEMPLATE.format(marker=marker)
    words.save_pretrained(folder)
    config.save_pretrained(folder)
    _name_picture(config, _picture_id(folder, words, marker))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = model_class._from_config(config)
    randomise(model, seed=0)
    model.generation_config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = words.pad_token_id
    model.save_pretrained(folder)
    return folder


def _processor_source(kind: str) -> str:
    name: str | None = _PROCESSORS.get(kind) or PROCESSOR_MAPPING_NAMES.get(kind)
    modules = [k for k, found in PROCESSOR_MAPPING_NAMES.items() if found == name] if name else []
    for named in [kind, *modules]:
        module = str(model_type_to_module_name(named))
        spec = importlib.util.find_spec("transformers")
        assert spec is not None and spec.origin is not None
        file: Path = Path(spec.origin).parent / "models" / module / f"processing_{module}.py"
        if file.is_file():
            return str(file.read_text(encoding="utf-8"))
    return ""


def _tokenizer(source: str) -> PreTrainedTokenizerFast:
    """With every token that the processor names, by its text or as an attribute."""
    named = {name: f"<{name}>" for name in _NAMED.findall(source) if name not in _USUAL}
    if "image_token" in named:
        named["image_token"] = "<image>"
    texts = sorted({*_TOKEN.findall(source), *named.values(), "<image>"})
    words = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(),
        **{k: v for k, v in _USUAL.items() if k != "unk_token"},
        extra_special_tokens=named,
    )
    words.add_tokens([*SPECIAL, *texts], special_tokens=True)
    return words


def _config(kind: str, model_class: Any, words: PreTrainedTokenizerFast) -> PreTrainedConfig:
    whole = model_class.config_class(**_OF_TYPES.get(kind, {}))
    config = smaller(whole, widths=True, layers=True)
    for part in _parts(config):
        for name, value in part.to_dict().items():
            counts_layers = re.fullmatch(r"(depth|num_hidden_layers|num_layers)", name)
            tower = part is not config.get_text_config(decoder=True) and not _indexed(part, config)
            if counts_layers and type(value) is int and tower:
                setattr(part, name, min(value, 3))
            if name == "vocab_size" and isinstance(value, int) and value > 20_000:
                setattr(part, name, len(words))
            if name == "max_position_embeddings" and isinstance(value, int):
                setattr(part, name, min(value, 16_384))
            if re.search(r"_token_(id|index)$", name) and isinstance(value, int):
                text = f"<{re.sub('_(id|index)$', '', name)}>"
                known = words.convert_tokens_to_ids(text)
                setattr(part, name, known if known is not None else words.pad_token_id)
    return config


def _parts(config: Any) -> list[Any]:
    parts = [getattr(config, name, None) for name in config.sub_configs]
    inner = [one for part in parts if isinstance(part, PreTrainedConfig) for one in _parts(part)]
    return [config, *inner]


def _indexed(part: Any, config: Any) -> bool:
    """Whether something names layers of a part by their index."""
    return any(
        re.search(r"index|feature_layer|deepstack|fullatt", name) and value is not None
        for one in (part, config)
        for name, value in one.to_dict().items()
        if not name.endswith("_token_index")
    )


def _image_processor(kind: str, config: Any) -> dict[str, Any]:
    named: Any = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind)
    name = _IMAGES.get(kind) or (named or {}).get("pil") or (named or {}).get("torchvision")
    if not name:
        raise ValueError("transformers names no image processor for it")
    written: dict[str, Any] = {"image_processor_type": name.removesuffix("Pil")}
    vision = getattr(config, "vision_config", None)
    side = getattr(vision, "image_size", None)
    images = getattr(transformers, name, None)
    if images is None or hasattr(images, "_backends"):  # one that cannot be imported here
        return written
    for own, theirs in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        value = getattr(vision, theirs, None)
        if hasattr(images, own) and type(value) is int:
            written[own] = value
    taken = getattr(images, "size", None)
    if type(side) is int and isinstance(taken, dict) and {"height", "width"} <= taken.keys():
        written["size"] = {"height": side, "width": side}
    return {**written, **_OF_IMAGES.get(kind, {})}


def _settings(source: str, config: Any) -> dict[str, Any]:
    """Arguments of a processor that a configuration knows."""
    vision = getattr(config, "vision_config", None)
    found = {}
    for name in ("patch_size", "vision_feature_select_strategy", "image_seq_length"):
        value = getattr(vision, name, None) or getattr(config, name, None)
        if re.search(rf"\b{name}\b", source) and isinstance(value, int | str):
            found[name] = value
    return found


def _picture_id(folder: Path, words: PreTrainedTokenizerFast, marker: str) -> int:
    """The token that the processor writes most of for a picture; where it writes none, that of the template."""
    try:
        checkpoint = Checkpoint(folder)
        processor = build_processor(checkpoint, checkpoint.image_processor_config)
        made = run_processor(processor, [Image.new("RGB", (64, 48))], processor.image_token)
    except Exception:  # whatever it raises says `tessera check` too
        return int(words.convert_tokens_to_ids(marker))
    [(found, _)] = Counter(made["input_ids"][0].tolist()).most_common(1)
    return int(found)


def _name_picture(config: Any, token: int) -> None:
    for part in _parts(config):
        for name in ("image_token_id", "image_token_index"):
            if name in part.to_dict():
                setattr(part, name, token)


_MARKERS = {"got_ocr2": "<imgpad>"}
_OF_TYPES: dict[str, dict[str, Any]] = {
    "granite4_vision": {
        "image_grid_pinpoints": [[224, 224], [224, 448]],
        "deepstack_layer_map": [[-2, 0], [-3, 1]],
        "spatial_target_layers": [2, 3],
        "downsample_rate": "1/2",
        "vision_config": {"model_type": "clip_vision_model", "patch_size": 28},
    },
}
_OF_IMAGES: dict[str, dict[str, Any]] = {
    "aria": {"max_image_size": 490, "min_image_size": 336},
    "paligemma": {"image_seq_length": 256},
    "granite4_vision": {
        "image_grid_pinpoints": [[224, 224], [224, 448]],
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
    },
}
_OF_PROCESSORS: dict[str, dict[str, Any]] = {
    "deepseek_vl": {"num_image_tokens": 196},
    "granite4_vision": {
        "patch_size": 28,
        "downsample_rate": "1/2",
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
}
