"""GGUF files of small models with pictures: the language model, and its vision part (mmproj), written with the library
`gguf` as llama.cpp's converters write them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints.gguf_files import Edit, Types, quantized, write_gguf

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    # The converter of CLIP towers has the two the other way round.
    "mlp.fc1": "ffn_down",
    "mlp.fc2": "ffn_up",
}
_INTERNVL_LAYER = {
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_QWEN_LAYER = {
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {
    "vision_tower.embeddings.class_embedding": "v.class_embd",
    "vision_tower.embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "vision_tower.embeddings.position_embedding.weight": "v.position_embd.weight",
    "vision_tower.pre_layrnorm": "v.pre_ln",
    "image_newline": "model.image_newline",
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
    "vision_model.embeddings.class_embedding": "v.class_embd",
    "vision_model.embeddings.position_embedding": "v.position_embd.weight",
    "vision_model.embeddings.patch_embedding": "v.patch_embd",
    "mlp1.0": "mm.model.mlp.0",
    "mlp1.1": "mm.model.mlp.1",
    "mlp1.3": "mm.model.mlp.3",
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.mlp.0": "mm.0",
    "visual.merger.mlp.2": "mm.2",
}
_BLOCK = re.compile(
    r"(?:vision_tower\.encoder\.layers|vision_model\.encoder\.layers|visual\.blocks)\.(\d+)\.(.+)\.(\w+)"
)
_SCALE = re.compile(r"vision_model\.encoder\.layers\.(\d+)\.(ls[12])")
_IS_VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "image_newline",
    "vision_model.",
    "mlp1.",
)
PLAIN: Types = {"": Kind.F32}


def write_pair(
    folder: Path, checkpoint: Path, types: Types = PLAIN, language: Types = PLAIN
) -> tuple[Path, Path]:
    """The LLaVA or Qwen2(.5)-VL in `checkpoint` as `model.gguf` and `mmproj-model.gguf` of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = write_language(folder / "model.gguf", checkpoint, language)
    return text, write_mmproj(folder / "mmproj-model.gguf", checkpoint, types)


def write_language(
    path: Path, checkpoint: Path, types: Types = PLAIN, edit: Edit | None = None
) -> Path:
    """The language model of a checkpoint with pictures, in a file."""
    alone = path.parent / "language"
    alone.mkdir()
    config = _config(checkpoint)
    text = config.get("text_config") or config["llm_config"]
    changes: list[Edit] = []
    if (sections := text["rope_parameters"].get("mrope_section")) is not None:
        text = {**text, "model_type": "qwen2vl"}
        changes.append(lambda writer: writer.add_rope_dimension_sections([*sections, 0]))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, alone)
    (alone / "config.json").write_text(json.dumps(text))
    found = {
        name.replace("language_model.", "", 1): tensor
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
        if not name.startswith(_IS_VISION)
    }
    found = {
        name if name.startswith(("model.", "lm_head")) else f"model.{name}": tensor
        for name, tensor in found.items()
    }
    save_file(found, alone / "model.safetensors", {"format": "pt"})

    def change(writer: GGUFWriter) -> None:
        for one in changes:
            one(writer)
        if edit is not None:
            edit(writer)

    write_gguf(path, alone, types, change)
    shutil.rmtree(alone)
    return path


def write_mmproj(
    path: Path, checkpoint: Path, types: Types = PLAIN, edit: Edit | None = None
) -> Path:
    """The vision part of a checkpoint, whose matrices have these types; edit: what is called before it is written."""
    config = _config(checkpoint)
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    images = json.loads((checkpoint / _images_of(checkpoint)).read_text())
    images = images.get("image_processor", images)
    writer.add_array("clip.vision.image_mean", images["image_mean"])
    writer.add_array("clip.vision.image_std", images["image_std"])
    kind = config["model_type"].split("_")[0]
    {"llava": _add_llava, "internvl": _add_internvl}.get(kind, _add_qwen)(writer, config)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.startswith(_IS_VISION):
            for stored, part in _parts(name, tensor):
                add_tensor(writer, stored, part.float().numpy(), types)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: GGUFWriter, name: str, rows: np.ndarray, types: Types) -> None:
    """Matrices in their type, or in float16 where their rows are no blocks of it; all others as converters do."""
    kind = next(kind for part, kind in types.items() if part in name)
    if rows.ndim == 4 and kind is not Kind.F32:
        kind = Kind.F16
    if rows.ndim == 1 or kind is Kind.F32:
        writer.add_tensor(name, rows)
    elif kind is Kind.F16 or rows.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        writer.add_tensor(name, rows.astype(np.float16))
    else:
        writer.add_tensor(name, quantized(rows, kind, len(name)), raw_dtype=kind)


def numbers_of(path: Path, checkpoint: Path) -> dict[str, Tensor]:
    """The numbers of a vision part by `gguf.dequantize`, under the names of the checkpoint."""
    stored = {
        tensor.name: torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in gguf.GGUFReader(path).tensors
    }
    found = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.startswith(_IS_VISION) and (named := _parts(name, tensor)):
            parts = [stored[other] for other, _ in named]
            joined = torch.stack(parts, 2) if "patch_embed.proj" in name else torch.cat(parts)
            found[name] = joined.float().view(tensor.shape)
    return found


def said(name: str, value: Any, add: Callable[[GGUFWriter, str, Any], None]) -> Edit:
    """A key in the place of the one of this name."""

    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(name, None)
        add(writer, name, value)

    return change


def without(name: str) -> Edit:
    """A file that lacks a tensor, or a key."""

    def change(writer: GGUFWriter) -> None:
        where = writer.tensors[0] if name in writer.tensors[0] else writer.kv_data[0]
        del where[name]

    return change


def _config(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return found


def _images_of(checkpoint: Path) -> str:
    names = ("preprocessor_config.json", "processor_config.json")
    return next(name for name in names if (checkpoint / name).is_file())


def _add_llava(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """A tower without the layers that no picture goes through."""
    vision = config["vision_config"]
    layers = vision["num_hidden_layers"]
    wanted = config["vision_feature_layer"]
    listed = wanted if isinstance(wanted, list) else [wanted]
    features = [index if index >= 0 else layers + index + 1 for index in listed]
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_bool("clip.use_gelu", vision["hidden_act"] == "gelu")
    writer.add_uint32("clip.vision.image_size", vision["image_size"])
    writer.add_uint32("clip.vision.patch_size", vision["patch_size"])
    writer.add_uint32("clip.vision.embedding_length", vision["hidden_size"])
    writer.add_uint32("clip.vision.feed_forward_length", vision["intermediate_size"])
    writer.add_uint32("clip.vision.projection_dim", vision["projection_dim"])
    writer.add_uint32("clip.vision.attention.head_count", vision["num_attention_heads"])
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["layer_norm_eps"])
    writer.add_uint32("clip.vision.block_count", max(features))
    if (sizes := config.get("image_grid_pinpoints")) is not None:
        writer.add_array(
            "clip.vision.image_grid_pinpoints", [edge for size in sizes for edge in size]
        )
        writer.add_string("clip.vision.mm_patch_merge_type", "spatial_unpad")
    if isinstance(wanted, list):
        writer.add_array("clip.vision.feature_layer", features)


def _add_qwen(writer: GGUFWriter, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    is_newer = config["model_type"] == "qwen2_5_vl"
    writer.add_string("clip.projector_type", "qwen2.5vl_merger" if is_newer else "qwen2vl_merger")
    if is_newer:
        writer.add_bool("clip.use_silu", True)
        writer.add_uint32("clip.vision.n_wa_pattern", vision["fullatt_block_indexes"][0] + 1)
    width = vision["hidden_size"] if is_newer else vision["embed_dim"]
    inner = vision["intermediate_size"] if is_newer else vision["hidden_size"]
    writer.add_uint32("clip.vision.image_size", 560)
    writer.add_uint32("clip.vision.patch_size", vision["patch_size"])
    writer.add_uint32("clip.vision.embedding_length", width)
    writer.add_uint32("clip.vision.feed_forward_length", inner)
    writer.add_uint32("clip.vision.projection_dim", config["text_config"]["hidden_size"])
    writer.add_uint32("clip.vision.attention.head_count", vision["num_heads"])
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_uint32("clip.vision.block_count", vision["depth"])


def _add_internvl(writer: GGUFWriter, config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    writer.add_string("clip.projector_type", "internvl")
    writer.add_bool("clip.use_gelu", True)
    writer.add_uint32("clip.vision.image_size", vision["image_size"])
    writer.add_uint32("clip.vision.patch_size", vision["patch_size"])
    writer.add_uint32("clip.vision.embedding_length", vision["hidden_size"])
    writer.add_uint32("clip.vision.feed_forward_length", vision["intermediate_size"])
    writer.add_uint32("clip.vision.projection_dim", config["llm_config"]["hidden_size"])
    writer.add_uint32("clip.vision.attention.head_count", vision["num_attention_heads"])
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["layer_norm_eps"])
    writer.add_uint32("clip.vision.block_count", vision["num_hidden_layers"])
    writer.add_uint32("clip.vision.projector.scale_factor", int(1 / config["downsample_ratio"]))
    writer.add_uint32("clip.vision.preproc_min_tiles", config["min_dynamic_patch"])
    writer.add_uint32("clip.vision.preproc_max_tiles", config["max_dynamic_patch"])


def _parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Names in the file and what they hold; nothing of layers that it leaves out."""
    if name == "visual.patch_embed.proj.weight":
        stored = "v.patch_embd.weight"
        return [(stored, tensor[:, :, 0]), (f"{stored}.1", tensor[:, :, 1])]
    if ".qkv." in name:
        names = [_stored(name.replace("qkv", part)) for part in "qkv"]
        return list(zip(names, tensor.chunk(3), strict=True))
    if found := _SCALE.fullmatch(name):
        return [(f"v.blk.{found[1]}.{found[2]}.weight", tensor)]
    if "post_layernorm" in name or name.startswith("vision_tower.encoder.layers.2."):
        return []
    return [(_stored(name), tensor)]


def _stored(name: str) -> str:
    if name in _OTHERS:
        return _OTHERS[name]
    if found := _BLOCK.fullmatch(name):
        kinds = {"visual": _QWEN_LAYER, "vision_model": _INTERNVL_LAYER, "vision_tower": _LAYER}
        return f"v.blk.{found[1]}.{kinds[name.split('.')[0]][found[2]]}.{found[3]}"
    stem, _, end = name.rpartition(".")
    return f"{_OTHERS[stem]}.{end}"
