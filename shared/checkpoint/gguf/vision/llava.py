"""LLaVA 1.5: a CLIP tower and a projector of two layers (clip.projector_type mlp).

Files say how many layers a tower has once those are left out that no picture goes through, so that without
`feature_layer` rows are what leaves the last of them.
Source: llama.cpp's `convert_image_encoder_to_gguf.py`, which calls fc1 ffn_down and fc2 ffn_up.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from shared.checkpoint.gguf.header import GgufHeader
from shared.checkpoint.gguf.vision.placeholder import find_or_add
from shared.checkpoint.gguf.vision.projector import Projector
from shared.checkpoint.gguf.vision.tensors import Expected, find_tensors, matrix, with_biases

PLACEHOLDER = "<image>"
# As the processor of the released checkpoints writes a conversation, pictures before the text.
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() }}: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_TOWER = "vision_tower.vision_model"
# Of what no picture goes through.
_UNUSED = frozenset({"v.post_ln.weight", "v.post_ln.bias"})


class Llava(Projector):
    """LLaVA 1.5."""

    languages = ("llama", "qwen2")
    class_name: ClassVar[str] = "LlavaForConditionalGeneration"
    model_type: ClassVar[str] = "llava"
    processor: ClassVar[str] = "CLIPImageProcessor"

    def __init__(self, header: GgufHeader) -> None:
        super().__init__(header)
        self.side = self.keys.whole("image_size")
        if self.side % self.patch:
            raise header.refusal(
                f"clip.vision.image_size is {self.side}, no multiple of patches of {self.patch}"
            )
        self._inner = self.keys.whole("feed_forward_length")
        self._eps = self.keys.number("attention.layer_norm_epsilon")
        self._features = tuple(self.keys.wholes("feature_layer")) or (self.layers,)
        if max(self._features) > self.layers:
            raise header.refusal(
                f"clip.vision.feature_layer is {list(self._features)}, of {self.layers} layers"
            )
        self.text_size, _ = matrix(header, "mm.2.weight")
        self._act = self.activation
        self.tensors = find_tensors(header, self.expected(), _UNUSED)

    def config(self, text: dict[str, Any], language: GgufHeader, folder: Path) -> dict[str, Any]:
        """See `Projector`."""
        layers = self._features[0] if len(self._features) == 1 else list(self._features)
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "text_config": text,
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": self.hidden,
                "intermediate_size": self._inner,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "image_size": self.side,
                "patch_size": self.patch,
                "hidden_act": self._act,
                "layer_norm_eps": self._eps,
            },
            "image_token_id": find_or_add(folder, PLACEHOLDER),
            "image_seq_length": (self.side // self.patch) ** 2,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": layers,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": text["tie_word_embeddings"],
        }

    def images(self) -> dict[str, Any]:
        """See `Projector`."""
        return {
            "image_processor_type": self.processor,
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": self.side},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": {"height": self.side, "width": self.side},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.mean,
            "image_std": self.deviation,
        }

    def template(self, given: str | None) -> str | None:
        """See `Projector`: one for text alone gets the placeholder in its text."""
        return _TEMPLATE if given is None else None

    def expected(self) -> Iterator[Expected]:
        """Its tensors."""
        width, text, patch = self.hidden, self.text_size, self.patch
        of = f"{_TOWER}.embeddings"
        yield Expected(f"{of}.class_embedding", (width,), ("v.class_embd",))
        patches = (width, 3, patch, patch)
        yield Expected(f"{of}.patch_embedding.weight", patches, ("v.patch_embd.weight",))
        places = ((self.side // patch) ** 2 + 1, width)
        yield Expected(f"{of}.position_embedding.weight", places, ("v.position_embd.weight",))
        yield from with_biases(
            {
                "v.pre_ln": (f"{_TOWER}.pre_layrnorm", (width,)),
                "mm.0": ("multi_modal_projector.linear_1", (text, width * len(self._features))),
                "mm.2": ("multi_modal_projector.linear_2", (text, text)),
            }
        )
        for number in range(self.layers):
            yield from self._layer(f"v.blk.{number}", f"{_TOWER}.encoder.layers.{number}")

    def _layer(self, stored: str, name: str) -> Iterator[Expected]:
        width, inner = self.hidden, self._inner
        # Where both are of one shape, it is the older converter that wrote them.
        first, second = "ffn_down", "ffn_up"
        if matrix(self.header, f"{stored}.ffn_down.weight") == (width, inner) and inner != width:
            first, second = second, first
        square = (width, width)
        yield from with_biases(
            {
                f"{stored}.{part}": (f"{name}.{called}", shape)
                for part, called, shape in (
                    ("attn_q", "self_attn.q_proj", square),
                    ("attn_k", "self_attn.k_proj", square),
                    ("attn_v", "self_attn.v_proj", square),
                    ("attn_out", "self_attn.out_proj", square),
                    ("ln1", "layer_norm1", (width,)),
                    ("ln2", "layer_norm2", (width,)),
                    (first, "mlp.fc1", (inner, width)),
                    (second, "mlp.fc2", (width, inner)),
                )
            }
        )
