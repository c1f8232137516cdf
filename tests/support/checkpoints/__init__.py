"""Small random checkpoints made with transformers: whole folders, for every service and end to end.

`make_checkpoint(folder, family, ...)` writes weights, config, generation config, a real byte-level
BPE tokenizer, a chat template and, for families with images, a processor. A family is a file here
with `build`, `inputs` and `respelt`, and a line in `_IMAGE_FAMILIES`; models that no family serves are
in `generic.py`.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL.Image import Image
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.checkpoints import (
    blip2,
    chatglm,
    fuyu,
    generic,
    internlm2,
    internvl_chat,
    llava,
    llava_next,
    qwen,
    qwen2_5_vl,
    qwen2_vl,
)
from tests.support.checkpoints.options import (
    TEXT_MODELS,
    CheckpointOptions,
    load_config,
    randomise,
    text_config,
    tokenizer,
)

_IMAGE_FAMILIES = {
    "blip2": blip2,
    "fuyu": fuyu,
    "internvl_chat": internvl_chat,
    "llava": llava,
    "llava_next": llava_next,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
}
# Layouts that transformers has no class for, of models that it has: `BASE` is what it saves, `TEXT` what its
# configuration has to say, `rewrite` makes the layout of what was saved.
_TEXT_LAYOUTS = {"chatglm": chatglm, "internlm2": internlm2, "qwen": qwen}
_LAYOUTS = {**_TEXT_LAYOUTS, "internvl_chat": internvl_chat}
TEXT_FAMILIES = (*TEXT_MODELS, *_TEXT_LAYOUTS)
FAMILIES = (*TEXT_FAMILIES, *_IMAGE_FAMILIES)
# Below a folder in another layout: the checkpoint as transformers saved it.
_SAVED = "saved_by_transformers"
GENERIC = tuple(generic.BUILDERS)  # whose prompt and encoder are transformers' code
SPELLINGS = ("saved", "old", "new")


def make_checkpoint(folder: Path, family: str = "llava", **options: Any) -> Path:
    """Writes a checkpoint of a family (FAMILIES, GENERIC) with CheckpointOptions; returns the folder.

    Every parameter of two or more dimensions is drawn from N(0, 0.2), so that greedy choices are
    not degenerate; the others are jittered.
    """
    layout = _LAYOUTS.get(family)
    if layout is None:
        return _save(folder, family, CheckpointOptions(**options))
    chosen = CheckpointOptions(**{**options, "text": layout.TEXT | options.get("text", {})})
    saved = _save(folder / _SAVED, layout.BASE, chosen)
    for file in saved.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    layout.rewrite(saved, folder, chosen)
    return folder


def _save(folder: Path, family: str, chosen: CheckpointOptions) -> Path:
    """A checkpoint as transformers saves it."""
    words = tokenizer()
    if family in _IMAGE_FAMILIES or family in GENERIC:
        build = generic.BUILDERS.get(family) or _IMAGE_FAMILIES[family].build
        model, processor = build(chosen, words)
        processor.save_pretrained(folder)
    else:
        model = TEXT_MODELS[family][1](text_config(family, chosen, words))
        words.save_pretrained(folder)
    randomise(model, chosen.seed)
    model = model.to(chosen.dtype)
    ids = chosen.eos_token_ids
    model.generation_config.eos_token_id = words.eos_token_id if ids is None else list(ids) or None
    model.generation_config.pad_token_id = words.pad_token_id
    size = "10GB" if chosen.shard_bytes is None else chosen.shard_bytes
    model.save_pretrained(folder, max_shard_size=size)
    if chosen.template is not None:
        (folder / "chat_template.jinja").write_text(chosen.template)
    if chosen.spelling != "saved":
        respell(folder, family, chosen.spelling)
    if chosen.old_rope and family.endswith("_vl"):
        qwen2_vl.like_older_versions(folder)
    elif chosen.old_rope:
        _respell_rope(folder)
    return folder


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint as transformers loads it, ready to be asked; of a layout that it has no class for, the same
    weights in the layout that it has."""
    folder = folder / _SAVED if (folder / _SAVED).is_dir() else folder
    architecture = load_config(folder)["architectures"][0]
    model: PreTrainedModel = getattr(transformers, architecture).from_pretrained(
        folder, dtype=dtype
    )
    return model.eval()


def respell(folder: Path, family: str, spelling: str) -> Path:
    """Renames a saved checkpoint's tensors as `CheckpointOptions.spelling` says."""
    respelt = _IMAGE_FAMILIES[family].respelt
    _respell_names(folder, lambda name: respelt(name, spelling))
    return folder


def reference_inputs(
    folder: Path, text: str, images: Sequence[Image] = (), **videos: Any
) -> dict[str, torch.Tensor]:
    """What transformers' `generate` takes for a rendered prompt and its pictures; `videos` for
    families that have them.
    """
    kind = load_config(folder)["model_type"].replace("-", "")
    if kind in _IMAGE_FAMILIES:
        found: dict[str, torch.Tensor] = _IMAGE_FAMILIES[kind].inputs(
            folder, text, images, **videos
        )
        return found
    if kind in GENERIC:
        return generic.inputs(folder, text, images)
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    return {"input_ids": words(text, return_tensors="pt", add_special_tokens=False)["input_ids"]}


def _respell_names(folder: Path, respelt: Callable[[str], str]) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {respelt(name): value for name, value in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {
            respelt(name): file for name, file in content["weight_map"].items()
        }
        index.write_text(json.dumps(content))


def _respell_rope(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    parameters = text.pop("rope_parameters")
    text["rope_theta"] = parameters.pop("rope_theta")
    if parameters.get("rope_type", "default") != "default":
        text["rope_scaling"] = parameters
    path.write_text(json.dumps(config))


__all__ = [
    "FAMILIES",
    "GENERIC",
    "SPELLINGS",
    "TEXT_FAMILIES",
    "CheckpointOptions",
    "load_config",
    "load_reference",
    "make_checkpoint",
    "reference_inputs",
    "respell",
    "tokenizer",
]


def as_torch_files(folder: Path) -> Path:
    """Rewrites a checkpoint's safetensors as files of `torch.save`, with an index where there was one."""
    for file in sorted(folder.glob("model*.safetensors")):
        torch.save(load_file(file), folder / _torch_name(file.name))
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {k: _torch_name(v) for k, v in content["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content))
        index.unlink()
    return folder


def _torch_name(name: str) -> str:
    return name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
