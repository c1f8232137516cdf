"""DeepSeek-VL2: SigLIP over tiles, a projector over 2x2 patches, a DeepSeek text model.

BEGIN, a system text, turns of users as `<|User|>: {text}` with two newlines and `<|Assistant|>:`, those of the model as
their text with END; each text without blanks around it (`format_messages_v2` of deepseek-ai/DeepSeek-VL2 @ef9f91e).
What stands between markers of images, and each message, is encoded by itself without other special tokens.
Assumption: the tower's GELU is the tanh one, eps 1e-6, `heads` of vision_config, 16 where it has none;
its last norm is applied, a pooling head is not used.
Assumption: an odd side of the patch grid gets one row and one column of zeros before unfolding.
Assumption: lines of the global view, `view_seperator`, lines of all tiles together ("2D", "head");
each line ends in `image_newline`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional

from tests.reference_models import towers, words
from tests.reference_models.common import (
    IMAGE,
    Draw,
    Generated,
    Reference,
    Turn,
    attention,
    below,
    count_layers,
    fill_rows,
    greedy,
    layer_norm,
    linear,
    read_json,
    read_tensors,
    write_folder,
)
from tests.reference_models.image_processors import deepseek_vl2_images
from tests.reference_models.text_models import deepseek_text
from tests.support.tokenizers import token_id

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIAL = (BEGIN, END, "<|User|>", "<|Assistant|>", IMAGE)
RATIO = 2


def write_checkpoint(
    folder: Path,
    *,
    side: int = 56,
    third: bool = False,
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    """A tiny checkpoint; tiles have `side` pixels, `third` takes the V3 text model; `text` and
    `vision` change keys of those configurations.
    """
    vocab_size = 500
    special = {token: 490 + place for place, token in enumerate(SPECIAL)}
    routing = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    if third:
        routing = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    language = {
        "model_type": "deepseek_v2",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "use_mla": True,
        "tie_word_embeddings": False,
        "bos_token_id": special[BEGIN],
        "eos_token_id": special[END],
        **routing,
        **(text or {}),
    }
    shape = {"width": 48, "layers": 2, "mlp_ratio": 1.5, "patch_size": 14, "heads": 4}
    sides = [[1, 1], [1, 2], [2, 1], [1, 3], [3, 1], [2, 2]]
    config: dict[str, Any] = {
        "model_type": "deepseek_vl_v2",
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "candidate_resolutions": [[side * a, side * b] for a, b in sides],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": language,
        "vision_config": {
            "model_type": "vision",
            "model_name": "siglip_so400m_patch14_384",
            "image_size": side,
            **shape,
            **(vision or {}),
        },
        "projector_config": {
            "model_type": "mlp_projector",
            "projector_type": "downsample_mlp_gelu",
            "depth": 2,
            "downsample_ratio": RATIO,
            "mlp_ratio": 1,
        },
    }
    config["projector_config"]["input_dim"] = config["vision_config"]["width"]
    config["projector_config"]["n_embed"] = language["hidden_size"]
    tensors = _draw_vision(config, Draw(seed)) | deepseek_text.draw(language, Draw(seed + 1))
    tokenizer = words.byte_level_words(special)
    return write_folder(folder, config, tensors, tokenizer, bos_token=BEGIN, eos_token=END)


def _draw_vision(config: dict[str, Any], random: Draw) -> dict[str, Tensor]:
    vision, hidden = config["vision_config"], config["language_config"]["hidden_size"]
    width, patch = vision["width"], vision["patch_size"]
    inner = int(width * vision["mlp_ratio"])
    tensors = {
        "vision.pos_embed": random.weight(1, (vision["image_size"] // patch) ** 2, width),
        "vision.patch_embed.proj.weight": random.weight(width, 3, patch, patch),
        "vision.patch_embed.proj.bias": random.bias(width),
        "image_newline": random.bias(hidden),
        "view_seperator": random.bias(hidden),
    }
    for layer in range(vision["layers"]):
        name = f"vision.blocks.{layer}."
        tensors |= random.norm(f"{name}norm1", width) | random.norm(f"{name}norm2", width)
        tensors |= random.linear(f"{name}attn.qkv", width, 3 * width)
        tensors |= random.linear(f"{name}attn.proj", width, width)
        tensors |= random.linear(f"{name}mlp.fc1", width, inner)
        tensors |= random.linear(f"{name}mlp.fc2", inner, width)
    tensors |= random.norm("vision.norm", width)
    tensors |= random.linear("projector.layers.0", width * RATIO**2, hidden)
    return tensors | random.linear("projector.layers.2", hidden, hidden)


class DeepSeekVL2(Reference):
    """The model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        self.tokenizer = words.read_tokenizer(folder)
        self.tensors = read_tensors(folder)
        language = below(self.tensors, "language.")
        self.text = deepseek_text.read(self.config["language_config"], language)
        self.image_id = token_id(self.tokenizer, IMAGE)
        vision = self.config["vision_config"]
        self.candidates = self.config["candidate_resolutions"]
        self.side = -(-(self.candidates[0][0] // vision["patch_size"]) // RATIO)

    def prompt_ids(self, turns: Sequence[Turn], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """BEGIN, then text and placeholders. The last turn is a user's."""
        ids, left = [token_id(self.tokenizer, BEGIN)], iter(sizes)
        for role, text in turns:
            if role == "user":
                first, *chunks = f"<|User|>: {text.strip()}\n\n<|Assistant|>:".split(IMAGE)
                ids += words.encode(self.tokenizer, first)
                for chunk in chunks:
                    ids += [self.image_id] * self.count_rows(*next(left), images=len(sizes))
                    ids += words.encode(self.tokenizer, chunk)
                continue
            ids += words.encode(self.tokenizer, text.strip())
            if role == "assistant":
                ids.append(token_id(self.tokenizer, END))
        return ids

    def count_rows(self, width: int, height: int, images: int) -> int:
        """Embedding rows of an image of this size in a prompt with so many."""
        counts = deepseek_vl2_images.tile_counts(width, height, self.candidates, images)
        columns, rows = counts[0] * self.side, counts[1] * self.side
        return int(self.side * (self.side + 1) + 1 + rows * (columns + 1))

    def pixel_values(self, image: Image, images: int = 1) -> Tensor:
        """[1 + tiles, 3, side, side]."""
        return deepseek_vl2_images.views(image, self.candidates, images)[0]

    def embed_image(self, image: Image, images: int = 1) -> Tensor:
        """[rows, hidden], for a prompt with so many images."""
        pixels, columns, rows = deepseek_vl2_images.views(image, self.candidates, images)
        whole, *tiles = (self.project(self.tower(view)) for view in pixels)
        lines = [
            torch.cat(tiles[row * columns : (row + 1) * columns], dim=1) for row in range(rows)
        ]
        separator = self.tensors["view_seperator"][None]
        return torch.cat(
            [self.with_line_ends(whole), separator, self.with_line_ends(torch.cat(lines))]
        )

    @torch.no_grad()
    def generate(self, ids: Sequence[int], images: Sequence[Image], count: int) -> Generated:
        """`count` greedy tokens. No id stops it."""
        rows = [self.embed_image(image, len(images)) for image in images]
        return greedy(lambda sequence: self.logits(sequence, rows), ids, count)

    def with_line_ends(self, grid: Tensor) -> Tensor:
        """The cells of a map, line after line, each with `image_newline` at its end."""
        ends = self.tensors["image_newline"].expand(len(grid), 1, -1)
        return torch.cat([grid, ends], dim=1).flatten(0, 1)

    def tower(self, pixels: Tensor) -> Tensor:
        """[patches, width] of one view, after the last norm."""
        tensors, heads = (
            below(self.tensors, "vision."),
            self.config["vision_config"].get("heads", 16),
        )
        x = towers.embed_patches(pixels, tensors, "patch_embed.proj") + tensors["pos_embed"][0]
        for layer in range(count_layers(tensors, "blocks.")):
            part = below(tensors, f"blocks.{layer}.")
            packed = linear(layer_norm(x, part, "norm1", 1e-6), part, "attn.qkv")
            query, key, value = packed.unflatten(-1, (3, heads, -1)).unbind(1)
            x = x + linear(attention(query, key, value), part, "attn.proj")
            y = linear(layer_norm(x, part, "norm2", 1e-6), part, "mlp.fc1")
            x = x + linear(functional.gelu(y, approximate="tanh"), part, "mlp.fc2")
        return layer_norm(x, tensors, "norm", 1e-6)

    def project(self, x: Tensor) -> Tensor:
        """Patches [n * n, width] as cells [side, side, hidden]: 2x2 patches, channel by channel."""
        side = int(len(x) ** 0.5)
        grid = x.view(side, side, -1).permute(2, 0, 1)
        missing = -side % RATIO
        grid = functional.pad(grid, (0, missing, 0, missing))
        cells = grid.unflatten(1, (-1, RATIO)).unflatten(3, (-1, RATIO))
        packed = cells.permute(1, 3, 0, 2, 4).flatten(2)
        y = functional.gelu(linear(packed, self.tensors, "projector.layers.0"))
        return linear(y, self.tensors, "projector.layers.2")

    def logits(self, ids: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        """Logits [ids, vocabulary]."""
        is_image = torch.tensor(ids) == self.image_id
        return self.text.logits(fill_rows(ids, is_image, self.text.table, rows))
