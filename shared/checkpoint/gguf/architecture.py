"""What the models that GGUF files are read of are called in them: their tensors and their keys.

Source: `gguf.constants` of the library `gguf`, and llama.cpp's `conversion` for the order of rows. transformers reads
these keys too (`integrations/ggml.py`), but leaves out how positions are scaled, so config.json is made here.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shared.checkpoint.gguf.header import GgufHeader, GgufTensor, Texts
from shared.text.cutting import cut

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Frequencies that are divided, each by its own number: it becomes a part of config.json.
_FREQUENCIES = "rope_freqs.weight"
# What files of towers and projectors say.
_PROJECTORS = ("clip", "mmproj")
_MOST_LAYERS = 1 << 12
# Keys that change what is computed, in ways that these models are not read with.
_OTHER_MODELS = (
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


@dataclass(frozen=True)
class Architecture:
    """`model_type` and `name` of its class in transformers; `turned`: rows of queries and keys lie in the order of
    ggml's rotation, whose pairs are neighbours; `head_norms`: queries and keys have norms."""

    model_type: str
    name: str
    turned: bool = False
    head_norms: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", turned=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    # Of text, whose three positions are one number.
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", head_norms=True),
}


class GgufModel:
    """A model in one file. Every method raises InvalidRequest, naming key or tensor, for what no such model has."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        if (parts := header.metadata.get("split.count")) not in (None, 0, 1):
            raise header.refusal(
                f"split.count is {parts}: it is one of several files; make one of them, llama-gguf-split --merge"
                " FIRST-OF-THEM.gguf WHOLE.gguf, and give that"
            )
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            shown, known = cut(repr(name), 40), ", ".join(ARCHITECTURES)
            if name in _PROJECTORS:
                raise header.refusal(
                    f"general.architecture is {shown}: it is the vision part of a model (mmproj); give the file of the"
                    " language model, and this one by --mmproj where it does not lie beside it"
                )
            raise header.refusal(
                f"general.architecture is {shown}; {known} are read: serve the checkpoint that it was made of"
            )
        self._called, self._kind = name, ARCHITECTURES[name]
        for key in _OTHER_MODELS:
            if header.metadata.get(f"{name}.{key}"):
                raise header.refusal(
                    f"{name}.{key} is not supported: serve the checkpoint that it was made of"
                )
        self.tensors = dict(self._named())

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries, and of keys and values."""
        queries = self._whole("attention.head_count")
        return queries, self._whole("attention.head_count_kv", queries)

    def turned_heads(self, name: str) -> int:
        """How many heads a tensor of queries or keys has, by its name in transformers, whose rows lie in the order of
        ggml's rotation; 0 for all others."""
        if not self._kind.turned:
            return 0
        queries, keys = self.heads
        if ".self_attn.q_proj." in name:
            return queries
        return keys if ".self_attn.k_proj." in name else 0

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        queries, keys = self.heads
        hidden, size = self._whole("embedding_length"), self._head_size()
        found = {
            "architectures": [self._kind.name],
            "model_type": self._kind.model_type,
            "vocab_size": self._table().shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._whole("feed_forward_length"),
            "num_hidden_layers": self._layers(),
            "num_attention_heads": queries,
            "num_key_value_heads": keys,
            "head_dim": size,
            "hidden_act": "silu",
            "max_position_embeddings": self._whole("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(size),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "use_sliding_window": False,
        }
        if self._kind.model_type != "qwen2":
            found["attention_bias"] = self._has("self_attn.q_proj.bias")
        if self._kind.model_type == "llama":
            found["mlp_bias"] = self._has("mlp.gate_proj.bias")
        for key, called in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
            index = self.header.metadata.get(f"tokenizer.ggml.{key}_token_id")
            if type(index) is int:
                found[f"{called}_token_id"] = index
        return found

    def end_ids(self) -> list[int]:
        """Of the tokens that end an answer."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        found = (self.header.metadata.get(key) for key in keys)
        return sorted({index for index in found if type(index) is int})

    def require_tensors(self) -> None:
        """Raises for a tensor that is missing, or has another shape than the keys say."""
        expected = dict(self._expected())
        for name, shape in expected.items():
            stored = self.tensors.get(name)
            if stored is None:
                raise self.header.refusal(f"it lacks {stored_name(name)} {list(shape)}")
            if stored.shape != shape:
                raise self.header.refusal(
                    f"the tensor {stored.name} is {list(stored.shape)}, and by its keys {list(shape)}"
                )
        for name, stored in self.tensors.items():
            if name not in expected and not name.endswith(".bias"):
                raise self.header.refusal(f"the model has no place for the tensor {stored.name}")

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors but biases."""
        queries, keys = self.heads
        hidden, inner = self._whole("embedding_length"), self._whole("feed_forward_length")
        size = self._head_size()
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries * size, hidden),
            "self_attn.k_proj": (keys * size, hidden),
            "self_attn.v_proj": (keys * size, hidden),
            "self_attn.o_proj": (hidden, queries * size),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if self._kind.head_norms:
            shapes |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
        table = (self._table().shape[0], hidden)
        yield "model.embed_tokens.weight", table
        yield "model.norm.weight", (hidden,)
        if "lm_head.weight" in self.tensors:
            yield "lm_head.weight", table
        for layer in range(self._layers()):
            for name, shape in shapes.items():
                yield f"model.layers.{layer}.{name}.weight", shape

    def _named(self) -> Iterator[tuple[str, GgufTensor]]:
        for stored, tensor in self.header.tensors.items():
            found = _BLOCK.fullmatch(stored)
            if stored == _FREQUENCIES:
                continue
            if stored in _OTHERS:
                yield _OTHERS[stored], tensor
            elif found and found[2] in _LAYER:
                yield f"model.layers.{int(found[1])}.{_LAYER[found[2]]}.{found[3]}", tensor
            else:
                raise self.header.refusal(
                    f"the tensor {cut(stored, 80)} has no place in a model of the architecture {self._called}"
                )

    def _table(self) -> GgufTensor:
        table = self.tensors.get("model.embed_tokens.weight")
        if table is None or len(table.shape) != 2:
            raise self.header.refusal("it lacks token_embd.weight, a matrix")
        return table

    def _layers(self) -> int:
        layers = self._whole("block_count")
        if layers > _MOST_LAYERS:
            raise self.header.refusal(f"{self._called}.block_count is {layers:,}")
        return layers

    def _head_size(self) -> int:
        queries, _ = self.heads
        size = self._whole("attention.key_length", self._whole("embedding_length") // queries)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := self._whole(key, size)) != size:
                raise self.header.refusal(
                    f"{self._called}.{key} is {other}, and heads have {size} elements: that is not supported"
                )
        return size

    def _rope(self, size: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self._number("rope.freq_base", 1e4),
        }
        kind = self._value("rope.scaling.type", "none")
        factor = self._number("rope.scaling.factor", 0.0)
        frequencies = self.header.tensors.get(_FREQUENCIES)
        if frequencies is not None:
            divided = self._read_frequencies(frequencies, size)
            length = self._whole("context_length")
            return (
                found
                | {
                    "rope_type": "longrope",  # of one factor for each frequency, here the same for all lengths
                    "short_factor": divided,
                    "long_factor": divided,
                    "factor": 1.0,
                    "attention_factor": 1.0,
                    "original_max_position_embeddings": length,
                }
            )
        if kind == "none" or not factor:
            return found
        if kind not in ("linear", "yarn"):
            raise self.header.refusal(
                f"{self._called}.rope.scaling.type is {cut(repr(kind), 40)}; none, linear and yarn are read"
            )
        found |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = self._whole("rope.scaling.original_context_length")
            found["original_max_position_embeddings"] = original
            if (given := self._number("rope.scaling.attn_factor", 1.0)) != 1:
                raise self.header.refusal(
                    f"{self._called}.rope.scaling.attn_factor is {given}: that is not supported"
                )
        return found

    def _read_frequencies(self, tensor: GgufTensor, size: int) -> list[float]:
        if tensor.kind.name != "F32" or tensor.shape != (size // 2,):
            raise self.header.refusal(
                f"the tensor {tensor.name} is {tensor.kind.name} {list(tensor.shape)} and has to be F32 [{size // 2}]"
            )
        with self.header.path.open("rb") as file:
            file.seek(tensor.begin)
            return list(struct.unpack(f"<{size // 2}f", file.read(tensor.nbytes)))

    def _has(self, name: str) -> bool:
        return f"model.layers.0.{name}" in self.tensors

    def _value(self, key: str, default: Any = None) -> Any:
        found = self.header.metadata.get(f"{self._called}.{key}", default)
        if found is None:
            raise self.header.refusal(f"it has no key {self._called}.{key}")
        return found

    def _whole(self, key: str, default: int | None = None) -> int:
        found = self._value(key, default)
        # Of each layer, where they are all the same.
        if isinstance(found, tuple) and found and len(set(found)) == 1:
            found = found[0]
        if type(found) is not int or not 0 < found < 1 << 31:
            raise self._wrong(key, found)
        return found

    def _number(self, key: str, default: float | None = None) -> float:
        found = self._value(key, default)
        if type(found) not in (int, float) or not 0 <= found < float("inf"):
            raise self._wrong(key, found)
        return float(found)

    def _wrong(self, key: str, found: Any) -> Exception:
        shown = f"a list of {found.count:,}" if isinstance(found, Texts) else cut(repr(found), 60)
        return self.header.refusal(f"{self._called}.{key} is {shown}")


def stored_name(name: str) -> str:
    """As a file calls a tensor, by its name in transformers."""
    for stored, known in _OTHERS.items():
        if known == name:
            return stored
    _, _, layer, rest = name.split(".", 3)
    part, _, end = rest.rpartition(".")
    stored = next(stored for stored, known in _LAYER.items() if known == part)
    return f"blk.{layer}.{stored}.{end}"
