"""Qwen2-VL and Qwen2.5-VL (clip.projector_type qwen2vl_merger, qwen2.5vl_merger).

Source: llama.cpp's `conversion/qwenvl.py`: of a convolution over two moments each is a tensor, queries, keys and values
are three. What is in no file is as in the released checkpoints: bounds of a picture's pixels, the edge of a window, and
a video's pace.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from shared.checkpoint.gguf.header import GgufHeader
from shared.checkpoint.gguf.vision.placeholder import require
from shared.checkpoint.gguf.vision.projector import Projector
from shared.checkpoint.gguf.vision.tensors import Expected, find_tensors, matrix, with_biases
from shared.text.cutting import cut

_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
# As the released checkpoints write a conversation, without their numbered pictures.
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SECTIONS = "qwen2vl.rope.dimension_sections"
_MOMENTS = 2
_PIXELS = (56 * 56, 28 * 28 * 16_384)
_WINDOW = 112
_TOKENS_PER_SECOND = 2


class Qwen2VL(Projector):
    """Qwen2-VL."""

    languages = ("qwen2vl",)
    model_type: ClassVar[str] = "qwen2_vl"
    class_name: ClassVar[str] = "Qwen2VLForConditionalGeneration"
    needs: ClassVar[str] = "quick_gelu"  # the activation that its class has
    gated: ClassVar[bool] = False

    def __init__(self, header: GgufHeader) -> None:
        super().__init__(header)
        if (found := self.activation) != self.needs:
            raise header.refusal(
                f"by clip.use_gelu and clip.use_silu its activation is {found}; a model of its projector type has"
                f" {self.needs}"
            )
        self._merge = self.keys.whole("spatial_merge_size", 2)
        self.text_size, _ = matrix(header, "mm.2.weight")
        # Some files say nothing of it, and others something else.
        up, down = (matrix(header, f"v.blk.0.ffn_{part}.weight") for part in ("up", "down"))
        self._swapped = up[0] == down[1] == self.hidden != up[1]
        self.inner = down[0] if self._swapped else up[0]
        self.tensors = find_tensors(header, self._expected())

    def require_pair(self, language: GgufHeader, size: int, head: int) -> None:
        """See `Projector`: also what the positions of pictures need."""
        super().require_pair(language, size, head)
        if 2 * sum(_sections(language)) != head:
            raise _no_sections(language)

    def config(self, text: dict[str, Any], language: GgufHeader, folder: Path) -> dict[str, Any]:
        """See `Projector`."""
        file = self.header.path
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "text_config": {
                **text,
                "model_type": f"{self.model_type}_text",
                "rope_parameters": text["rope_parameters"]
                | {"mrope_section": list(_sections(language))},
            },
            "vision_config": {
                "model_type": self.model_type,
                "depth": self.layers,
                "num_heads": self.heads,
                "in_channels": 3,
                "patch_size": self.patch,
                "spatial_merge_size": self._merge,
                "temporal_patch_size": _MOMENTS,
                "hidden_act": self.needs,
                **self.sizes(),
            },
            **{key: require(folder, token, file) for key, token in _TOKENS.items()},
            "tie_word_embeddings": text["tie_word_embeddings"],
        }

    def sizes(self) -> dict[str, Any]:
        """What the two versions call differently."""
        if self.inner % self.hidden:
            raise self.header.refusal(
                f"the tensor v.blk.0.ffn_up.weight has {self.inner} outputs, no multiple of {self.hidden} elements"
            )
        ratio = self.inner // self.hidden
        return {"embed_dim": self.hidden, "hidden_size": self.text_size, "mlp_ratio": ratio}

    def images(self) -> dict[str, Any]:
        """See `Projector`."""
        least, most = (
            self.keys.whole(f"image_{which}_pixels", usual)
            for which, usual in zip(("min", "max"), _PIXELS, strict=True)
        )
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": least, "longest_edge": most},
            "resample": 3,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.mean,
            "image_std": self.deviation,
            "patch_size": self.patch,
            "merge_size": self._merge,
            "temporal_patch_size": _MOMENTS,
        }

    def template(self, given: str | None) -> str | None:
        """See `Projector`."""
        return None if given and _TOKENS["image_token_id"] in given else _TEMPLATE

    def _expected(self) -> Iterator[Expected]:
        width, edge = self.hidden, self.patch
        yield Expected(
            "visual.patch_embed.proj.weight",
            (width, 3, _MOMENTS, edge, edge),
            ("v.patch_embd.weight", "v.patch_embd.weight.1"),
            "moments",
        )
        merged = width * self._merge**2
        yield from self._norm("v.post_ln", "visual.merger.ln_q")
        yield from with_biases(
            {
                "mm.0": ("visual.merger.mlp.0", (merged, merged)),
                "mm.2": ("visual.merger.mlp.2", (self.text_size, merged)),
            }
        )
        for number in range(self.layers):
            yield from self._layer(f"v.blk.{number}", f"visual.blocks.{number}")

    def _layer(self, stored: str, name: str) -> Iterator[Expected]:
        width, inner = self.hidden, self.inner
        for end, shape in (("weight", (3 * width, width)), ("bias", (3 * width,))):
            parts = tuple(f"{stored}.attn_{part}.{end}" for part in "qkv")
            whole = f"{stored}.attn_qkv.{end}"
            parts = (whole,) if whole in self.header.tensors else parts
            yield Expected(f"{name}.attn.qkv.{end}", shape, parts)
        yield from self._norm(f"{stored}.ln1", f"{name}.norm1")
        yield from self._norm(f"{stored}.ln2", f"{name}.norm2")
        up, down = ("up_proj", "down_proj") if self.gated else ("fc1", "fc2")
        first, second = ("ffn_down", "ffn_up") if self._swapped else ("ffn_up", "ffn_down")
        layers = {
            f"{stored}.attn_out": (f"{name}.attn.proj", (width, width)),
            f"{stored}.{first}": (f"{name}.mlp.{up}", (inner, width)),
            f"{stored}.{second}": (f"{name}.mlp.{down}", (width, inner)),
        }
        if self.gated:
            layers[f"{stored}.ffn_gate"] = (f"{name}.mlp.gate_proj", (inner, width))
        yield from with_biases(layers)

    def _norm(self, stored: str, name: str) -> Iterator[Expected]:
        """RMS norms have no bias."""
        return with_biases({stored: (name, (self.hidden,))}, bias=not self.gated)


def _sections(language: GgufHeader) -> tuple[int, ...]:
    """How many of a head's frequencies count time, rows and columns."""
    found = language.metadata.get(_SECTIONS)
    if not isinstance(found, tuple) or len(found) not in (3, 4) or any(found[3:]):
        raise _no_sections(language)
    if not all(type(size) is int and size >= 0 for size in found):
        raise _no_sections(language)
    return found[:3]


def _no_sections(language: GgufHeader) -> Exception:
    shown = cut(repr(language.metadata.get(_SECTIONS)), 60)
    return language.refusal(
        f"{_SECTIONS} is {shown}; pictures need how the frequencies of a head are divided among time, rows and columns"
    )


class Qwen2_5VL(Qwen2VL):
    """Qwen2.5-VL: every so many layers one whose patches see all others, in the others those of a window."""

    model_type = "qwen2_5_vl"
    class_name = "Qwen2_5_VLForConditionalGeneration"
    needs = "silu"
    gated = True

    def __init__(self, header: GgufHeader) -> None:
        super().__init__(header)
        self._every = self.keys.whole("n_wa_pattern")
        self._window = self.keys.whole("window_size", _WINDOW)
        if self._window < self.patch * self._merge:
            raise header.refusal(
                f"clip.vision.window_size is {self._window}, less than {self._merge} patches of {self.patch}"
            )

    def sizes(self) -> dict[str, Any]:
        """See `Qwen2VL`."""
        return {
            "hidden_size": self.hidden,
            "out_hidden_size": self.text_size,
            "intermediate_size": self.inner,
            "window_size": self._window,
            "fullatt_block_indexes": list(range(self._every - 1, self.layers, self._every)),
            "tokens_per_second": _TOKENS_PER_SECOND,
        }
