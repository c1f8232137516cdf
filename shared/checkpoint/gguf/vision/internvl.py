"""InternVL (clip.projector_type internvl): InternViT over the tiles of a picture, in the layout of its own releases.

Source: llama.cpp's `conversion/internvl.py`. Files do not say how squares of patches are put into rows: as in InternVL2
and later ones, which is not how InternVL-Chat-V1.5 has it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.checkpoint.gguf.header import GgufHeader
from shared.checkpoint.gguf.vision.placeholder import require
from shared.checkpoint.gguf.vision.projector import Projector
from shared.checkpoint.gguf.vision.tensors import Expected, find_tensors, matrix, with_biases

_TOKENS = ("<img>", "<IMG_CONTEXT>", "</img>")
_TILES = (1, 12)  # least and most of a picture, where a file does not say it
_MOST_TILES = 256
_LAYERS = "vision_model.encoder.layers"


class InternVL(Projector):
    """InternVL2 to 3.5."""

    languages = ("llama", "qwen2", "qwen3")

    def __init__(self, header: GgufHeader) -> None:
        super().__init__(header)
        if (found := self.activation) != "gelu":
            raise header.refusal(f"by clip.use_gelu its activation is {found}; InternViT has gelu")
        self._side = self.keys.whole("image_size")
        self._fold = self.keys.whole("projector.scale_factor", 2)
        if self._side % (self.patch * self._fold):
            raise header.refusal(
                f"clip.vision.image_size is {self._side}, no multiple of {self._fold} patches of {self.patch}"
            )
        self._tiles = tuple(
            self.keys.whole(f"preproc_{which}_tiles", usual)
            for which, usual in zip(("min", "max"), _TILES, strict=True)
        )
        if not self._tiles[0] <= self._tiles[1] <= _MOST_TILES:
            raise header.refusal(
                f"clip.vision.preproc_min_tiles is {self._tiles[0]} and preproc_max_tiles {self._tiles[1]}"
            )
        self._inner = self.keys.whole("feed_forward_length")
        self._eps = self.keys.number("attention.layer_norm_epsilon")
        self.text_size, _ = matrix(header, "mm.model.mlp.3.weight")
        first = "v.blk.0"
        self._has_bias = f"{first}.attn_q.bias" in header.tensors
        self._has_head_norms = f"{first}.attn_q_norm.weight" in header.tensors
        self._is_rms = f"{first}.ln1.bias" not in header.tensors
        self.tensors = find_tensors(header, self._expected())

    def config(self, text: dict[str, Any], language: GgufHeader, folder: Path) -> dict[str, Any]:
        """See `Projector`."""
        for token in _TOKENS:
            require(folder, token, self.header.path)
        least, most = self._tiles
        return {
            "architectures": ["InternVLChatModel"],
            "model_type": "internvl_chat",
            "llm_config": text,
            "vision_config": {
                "hidden_size": self.hidden,
                "intermediate_size": self._inner,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "image_size": self._side,
                "patch_size": self.patch,
                "qkv_bias": self._has_bias,
                "qk_normalization": self._has_head_norms,
                "norm_type": "rms_norm" if self._is_rms else "layer_norm",
                "layer_norm_eps": self._eps,
            },
            "downsample_ratio": 1 / self._fold,
            "select_layer": -1,
            "force_image_size": self._side,
            "ps_version": "v2",
            "dynamic_image_size": True,
            "use_thumbnail": True,
            "min_dynamic_patch": least,
            "max_dynamic_patch": most,
            "tie_word_embeddings": text["tie_word_embeddings"],
        }

    def images(self) -> dict[str, Any]:
        """See `Projector`."""
        return {
            "image_processor_type": "CLIPImageProcessor",
            "size": self._side,
            "crop_size": self._side,
            "image_mean": self.mean,
            "image_std": self.deviation,
        }

    def template(self, given: str | None) -> str | None:
        """See `Projector`: pictures are put into the text."""
        return None

    def _expected(self) -> Iterator[Expected]:
        width, patch, text = self.hidden, self.patch, self.text_size
        of, places = "vision_model.embeddings", (self._side // patch) ** 2 + 1
        yield Expected(f"{of}.class_embedding", (1, 1, width), ("v.class_embd",))
        yield Expected(f"{of}.position_embedding", (1, places, width), ("v.position_embd.weight",))
        wide = width * self._fold**2
        yield from with_biases(
            {
                "v.patch_embd": (f"{of}.patch_embedding", (width, 3, patch, patch)),
                "mm.model.mlp.0": ("mlp1.0", (wide,)),
                "mm.model.mlp.1": ("mlp1.1", (text, wide)),
                "mm.model.mlp.3": ("mlp1.3", (text, text)),
            }
        )
        for number in range(self.layers):
            yield from self._layer(f"v.blk.{number}", f"{_LAYERS}.{number}")

    def _layer(self, stored: str, name: str) -> Iterator[Expected]:
        width, inner = self.hidden, self._inner
        for end, shape in (("weight", (3 * width, width)), ("bias", (3 * width,))):
            if end == "weight" or self._has_bias:
                parts = tuple(f"{stored}.attn_{part}.{end}" for part in "qkv")
                yield Expected(f"{name}.attn.qkv.{end}", shape, parts)
        yield from with_biases(
            {
                f"{stored}.attn_out": (f"{name}.attn.proj", (width, width)),
                f"{stored}.ffn_up": (f"{name}.mlp.fc1", (inner, width)),
                f"{stored}.ffn_down": (f"{name}.mlp.fc2", (width, inner)),
            }
        )
        norms = {f"{stored}.ln{n}": (f"{name}.norm{n}", (width,)) for n in (1, 2)}
        yield from with_biases(norms, bias=not self._is_rms)
        if self._has_head_norms:
            heads = {f"{stored}.attn_{p}_norm": (f"{name}.attn.{p}_norm", (width,)) for p in "qk"}
            yield from with_biases(heads, bias=False)
        for number in (1, 2):
            yield Expected(f"{name}.ls{number}", (width,), (f"{stored}.ls{number}.weight",))
