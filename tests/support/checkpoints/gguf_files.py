"""GGUF files of small checkpoints, written with the library `gguf` as llama.cpp's converter writes them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
# What llama.cpp calls the kinds of tokens.
_NORMAL, _CONTROL = 1, 3
# By the part of a name that it holds; "" is for the others that are matrices.
Types = Mapping[str, GGMLQuantizationType]
Edit = Callable[[GGUFWriter], None]


def gguf_name(name: str) -> str:
    """As the file calls a tensor of transformers."""
    stem, _, end = name.rpartition(".")
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{end}"


def write_gguf(path: Path, folder: Path, types: Types, edit: Edit | None = None) -> Path:
    """The checkpoint in `folder`, a Llama, Qwen2 or Qwen3, in a file whose matrices have these types. edit: what is
    called before the file is written. In `folder` weights are what the file's codes stand for then."""
    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    writer = GGUFWriter(path, architecture)
    _add_config(writer, config)
    _add_tokenizer(writer, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        rows = _turned(name, tensor, config) if architecture == "llama" else tensor
        _add_tensor(writer, gguf_name(name), rows.float().numpy(), types)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(
    path: Path, like: Mapping[str, Tensor], turned: tuple[int, int] | None
) -> dict[str, Tensor]:
    """The numbers of a file by `gguf.dequantize`, under the names and in the order of rows of transformers. turned:
    heads of queries and of keys, where their rows lie as ggml rotates them."""
    found = {}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in like:
        tensor = stored.get(gguf_name(name))
        if tensor is None:
            continue
        rows = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        if turned and ".self_attn.q_proj" in name:
            rows = _unturn(rows, turned[0])
        if turned and ".self_attn.k_proj" in name:
            rows = _unturn(rows, turned[1])
        found[name] = rows.view(like[name].shape)
    return found


def quantized(rows: np.ndarray, kind: GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """Blocks of a type: of the rows where the library has its quantizer, else of codes at random, whose scales are
    about as large as a layer's."""
    try:
        return gguf.quantize(rows, kind)
    except NotImplementedError:
        return random_blocks(rows.shape, kind, seed)


# Of each type where its blocks have numbers of 16 bits, which are no scales at random.
_SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "IQ1_M": (),
}  # fmt: skip


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """uint8 [out, bytes of a row]."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    out, inputs = shape
    blocks = generator.integers(0, 256, (out * inputs // elements, nbytes), dtype=np.uint8)
    for place in _SCALES[kind.name]:
        scales = generator.uniform(0.5, 1.5, len(blocks)).astype(np.float16) / np.float16(1024)
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(out, -1)


def _add_tensor(writer: GGUFWriter, name: str, rows: np.ndarray, types: Types) -> None:
    if rows.ndim == 1:
        writer.add_tensor(name, rows.astype(np.float32))
        return
    kind = next(kind for part, kind in types.items() if part in name)
    if kind is GGMLQuantizationType.F32:
        writer.add_tensor(name, rows)
    elif kind is GGMLQuantizationType.F16:
        writer.add_tensor(name, rows.astype(np.float16))
    else:
        blocks = quantized(rows, kind, len(name))
        writer.add_tensor(name, blocks, raw_dtype=kind)


def _add_config(writer: GGUFWriter, config: dict[str, object]) -> None:
    def whole(key: str) -> int:
        return int(str(config[key]))

    heads = whole("num_attention_heads")
    size = int(str(config.get("head_dim") or whole("hidden_size") // heads))
    rope = config["rope_parameters"]
    assert isinstance(rope, dict)
    writer.add_context_length(whole("max_position_embeddings"))
    writer.add_embedding_length(whole("hidden_size"))
    writer.add_feed_forward_length(whole("intermediate_size"))
    writer.add_block_count(whole("num_hidden_layers"))
    writer.add_head_count(heads)
    writer.add_head_count_kv(whole("num_key_value_heads"))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(str(config["rms_norm_eps"])))


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    words = json.loads((folder / "tokenizer.json").read_text())
    said = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = dict(words["model"]["vocab"])
    special = {token["content"]: token["id"] for token in words["added_tokens"]}
    ids = {index: text for text, index in (vocabulary | special).items()}
    size = max(ids) + 1
    tokens = [ids.get(index, f"[PAD{index}]") for index in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in special else _NORMAL for token in tokens])
    merges = words["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if isinstance(said.get(key), str):
            add(special[said[key]])
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def _turned(name: str, rows: Tensor, config: dict[str, object]) -> Tensor:
    """llama.cpp's order of the rows of Llama's queries and keys."""
    key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if part not in key:
        return rows
    heads = int(str(config[key[part]]))
    size = len(rows) // heads // 2
    return rows.view(heads, 2, size, -1).transpose(1, 2).reshape(rows.shape)


def _unturn(rows: Tensor, heads: int) -> Tensor:
    size = len(rows) // heads // 2
    return rows.view(heads, size, 2, -1).transpose(1, 2).reshape(rows.shape)
