"""Molmo v1: pooled CLIP features of crops, added to the embeddings of patch tokens.

Assumption: the prompt is <|endoftext|>, the images, then ` User: {text} Assistant:`; later turns go
on as ` User: ` and ` Assistant: ` with a blank between turns; images come first wherever they stand.
Assumption: an image is start, global lines, end, start, the crops' lines, end; each line ends in col.
Assumption: names <im_start>, <im_end>, <im_patch>, <im_col> in the tokenizer; they are looked up.
Assumption: att_proj is all q, all k, all v; q_norm and k_norm act on all heads together, with
attention_layer_norm. The head has no row for the additional vocabulary.
Assumption: the pooling attention has 16 heads and the vision model's width; eps of the vision model
is 1e-5; image_projector has no biases; each 2x2 cell's rows are its patches row by row.
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
    Reference,
    Turn,
    attention,
    below,
    causal,
    count_layers,
    layer_norm,
    linear,
    read_json,
    read_tensors,
    rms_norm,
    rotate_half,
    write_folder,
)
from tests.reference_models.image_processors import molmo_images
from tests.support.tokenizers import token_id

VIT_LAYERS = (-2, -9)
VISION = "model.vision_backbone."
SPECIAL = ("<im_end>", "<im_col>", "<im_patch>", "<im_start>")  # first ids after the vocabulary


def write_checkpoint(
    folder: Path,
    *,
    vision_hidden: int = 64,
    vision_layers: int = 9,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A tiny checkpoint; `changes` of keys of config.json."""
    vocab_size = 488
    config = {
        "model_type": "molmo",
        "architectures": ["MolmoForCausalLM"],
        "vocab_size": vocab_size,
        "embedding_size": vocab_size,
        "additional_vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "layer_norm_eps": 1e-6,
        "layer_norm_type": "rms",
        "qkv_bias": True,
        "attention_layer_norm": False,
        "norm_after": False,
        "weight_tying": False,
        "use_position_ids": True,
        "clip_qkv": None,
        "tie_word_embeddings": False,
    } | changes
    tokenizer = words.byte_level_words(
        {token: vocab_size + place for place, token in enumerate(SPECIAL)}
    )
    random = Draw(seed)
    vision = _draw_vision(config, random, vision_hidden, vision_layers)
    tensors, end = _draw_text(config, random) | vision, "<|endoftext|>"
    return write_folder(folder, config, tensors, tokenizer, eos_token=end)


def _draw_text(config: dict[str, Any], random: Draw) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = hidden // config["num_attention_heads"]
    groups = config["num_key_value_heads"] * size
    tensors = {
        "wte.embedding": random.weight(config["embedding_size"], hidden),
        "wte.new_embedding": random.weight(config["additional_vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"blocks.{layer}."
        tensors |= random.linear(f"{name}att_proj", hidden, hidden + 2 * groups, config["qkv_bias"])
        tensors |= random.linear(f"{name}attn_out", hidden, hidden, bias=False)
        tensors |= random.linear(f"{name}ff_proj", hidden, inner, bias=False)
        tensors |= random.linear(f"{name}ff_out", inner // 2, hidden, bias=False)
        tensors |= random.norm(f"{name}attn_norm", hidden, bias=False)
        tensors |= random.norm(f"{name}ff_norm", hidden, bias=False)
        if config["attention_layer_norm"]:
            tensors |= random.norm(f"{name}q_norm", hidden, bias=False)
            tensors |= random.norm(f"{name}k_norm", groups, bias=False)
    tensors |= random.norm("ln_f", hidden, bias=False)
    tensors |= random.linear("ff_out", hidden, config["embedding_size"], bias=False)
    return {f"model.transformer.{name}": tensor for name, tensor in tensors.items()}


def _draw_vision(
    config: dict[str, Any], random: Draw, width: int, layers: int
) -> dict[str, Tensor]:
    inner = 96
    tensors = {
        "image_vit.class_embedding": random.bias(width),
        "image_vit.positional_embedding": random.weight(molmo_images.GRID**2 + 1, width),
        "pad_embed": random.weight(2, 2 * width),
    }
    patch = 3 * molmo_images.PATCH**2
    tensors |= random.linear("image_vit.patch_embedding", patch, width, bias=False)
    tensors |= random.norm("image_vit.pre_ln", width)
    for layer in range(layers):
        name = f"image_vit.transformer.resblocks.{layer}."
        for part in ("wq", "wk", "wv", "wo"):
            tensors |= random.linear(f"{name}attention.{part}", width, width)
        tensors |= random.linear(f"{name}feed_forward.w1", width, inner)
        tensors |= random.linear(f"{name}feed_forward.w2", inner, width)
        tensors |= random.norm(f"{name}attention_norm", width)
        tensors |= random.norm(f"{name}ffn_norm", width)
    for part in ("wq", "wk", "wv"):
        tensors |= random.linear(f"image_pooling_2d.{part}", 2 * width, width)
    tensors |= random.linear("image_pooling_2d.wo", width, width)
    half = config["intermediate_size"] // 2
    tensors |= random.linear("image_projector.w1", width, half, bias=False)
    tensors |= random.linear("image_projector.w2", half, config["hidden_size"], bias=False)
    tensors |= random.linear("image_projector.w3", width, half, bias=False)
    return {VISION + name: tensor for name, tensor in tensors.items()}


class Molmo(Reference):
    """The model of a folder; `vision_heads` are the tower's and the pooling's, which no file names."""

    def __init__(self, folder: Path, vision_heads: int = 16) -> None:
        self.config = read_json(folder / "config.json")
        self.tokenizer = words.read_tokenizer(folder)
        self.vision_heads = vision_heads
        tensors = read_tensors(folder)
        self.text = below(tensors, "model.transformer.")
        self.vision = below(tensors, VISION)
        self.end, self.col, self.patch, self.start = (
            token_id(self.tokenizer, token) for token in SPECIAL
        )

    def prompt_ids(self, turns: Sequence[Turn], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """<|endoftext|>, the images, the text."""
        ids = [token_id(self.tokenizer, "<|endoftext|>")]
        for size in sizes:
            ids += self.image_ids(*size)
        return ids + words.encode(self.tokenizer, self.prompt(turns))

    @staticmethod
    def prompt(turns: Sequence[Turn]) -> str:
        """The text without markers of images."""
        parts = [f" {role.capitalize()}: {text.replace(IMAGE, '')}" for role, text in turns]
        return "".join(parts) + " Assistant:"

    def image_ids(self, width: int, height: int) -> list[int]:
        """Ids of an image of this size: each <im_patch> gets one row."""
        ids = []
        tiling = molmo_images.select_tiling(width, height)
        for rows, columns in ((molmo_images.TOKENS,) * 2, molmo_images.token_grid(tiling)):
            ids += [self.start, *[*[self.patch] * columns, self.col] * rows, self.end]
        return ids

    def pixel_values(self, image: Image) -> Tensor:
        """Patches [crops, 576, 588], global view first."""
        return molmo_images.crops(image).patches

    def embed_image(self, image: Image) -> Tensor:
        """[patch tokens, hidden], in the order of the tokens."""
        cut = molmo_images.crops(image)
        features = torch.stack([self.tower(patches) for patches in cut.patches])
        empty, partial = cut.masks == 0, (cut.masks < 1) & (cut.masks != 0)
        for row, masked in enumerate((empty, partial)):
            features = features + self.vision["pad_embed"][row] * masked[..., None]
        rows = self.project(torch.cat([self.pool(crop) for crop in features]))
        placed = cut.order >= 0
        ordered = torch.empty(int(placed.sum()), rows.shape[1])
        ordered[cut.order[placed]] = rows[placed]
        return ordered

    def tower(self, patches: Tensor) -> Tensor:
        """Patches [576, 588] as features [576, 2 * vision hidden] of two layers."""
        vit = below(self.vision, "image_vit.")
        x = linear(patches, vit, "patch_embedding")
        x = torch.cat([vit["class_embedding"][None], x]) + vit["positional_embedding"]
        x = layer_norm(x, vit, "pre_ln", 1e-5)
        outputs = []
        for layer in range(count_layers(vit, "transformer.resblocks.")):
            part = below(vit, f"transformer.resblocks.{layer}.")
            y = layer_norm(x, part, "attention_norm", 1e-5)
            x = x + self._attend(y, y, below(part, "attention."))
            y = linear(layer_norm(x, part, "ffn_norm", 1e-5), part, "feed_forward.w1")
            x = x + linear(towers.activate(y, "quick_gelu"), part, "feed_forward.w2")
            outputs.append(x)
        return torch.cat([outputs[layer][1:] for layer in VIT_LAYERS], dim=-1)

    def pool(self, features: Tensor) -> Tensor:
        """One crop's features [576, 2 * width] as [144, width]: 2x2 cells, asked by their mean."""
        side = molmo_images.TOKENS
        cells = features.view(side, 2, side, 2, -1).transpose(1, 2).reshape(side * side, 4, -1)
        part = below(self.vision, "image_pooling_2d.")
        # Each cell is a batch of its own: one query, four keys.
        query = linear(cells.mean(1, keepdim=True), part, "wq")
        key, value = linear(cells, part, "wk"), linear(cells, part, "wv")
        heads = (rows.unflatten(-1, (self.vision_heads, -1)) for rows in (query, key, value))
        mixed = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in heads))
        return linear(mixed.transpose(1, 2).flatten(1), part, "wo")

    def project(self, x: Tensor) -> Tensor:
        """w2(silu(w1 x) * w3 x)."""
        part = below(self.vision, "image_projector.")
        return linear(functional.silu(linear(x, part, "w1")) * linear(x, part, "w3"), part, "w2")

    def _attend(self, rows: Tensor, columns: Tensor, part: dict[str, Tensor]) -> Tensor:
        query, key, value = (
            linear(x, part, name).unflatten(-1, (self.vision_heads, -1))
            for x, name in ((rows, "wq"), (columns, "wk"), (columns, "wv"))
        )
        return linear(attention(query, key, value), part, "wo")

    def logits(self, ids: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        """Logits [ids, vocabulary]: the images' rows are added to the embeddings of <im_patch>."""
        table = torch.cat([self.text["wte.embedding"], self.text["wte.new_embedding"]])
        x = table[torch.tensor(ids)]
        is_patch = torch.tensor(ids) == self.patch
        x[is_patch] += torch.cat([*rows, x[:0]])
        return self.decode(x)

    def decode(self, x: Tensor) -> Tensor:
        """Logits [rows, vocabulary] for embeddings [rows, hidden]."""
        eps, after = self.config["layer_norm_eps"], self.config["norm_after"]
        for layer in range(self.config["num_hidden_layers"]):
            part = below(self.text, f"blocks.{layer}.")
            for name, run in (("attn_norm", self._attention), ("ff_norm", self._feed_forward)):
                weight = part[f"{name}.weight"]
                y = run(x if after else rms_norm(x, weight, eps), part)
                x = x + (rms_norm(y, weight, eps) if after else y)
        x = rms_norm(x, self.text["ln_f.weight"], eps)
        tied = self.config["weight_tying"]
        head = self.text["wte.embedding"] if tied else self.text["ff_out.weight"]
        return functional.linear(x, head)

    def _attention(self, x: Tensor, part: dict[str, Tensor]) -> Tensor:
        config = self.config
        size = config["hidden_size"] // config["num_attention_heads"]
        groups = config["num_key_value_heads"] * size
        packed = linear(x, part, "att_proj")
        query, key, value = packed.split([config["hidden_size"], groups, groups], dim=-1)
        if config["attention_layer_norm"]:
            query = rms_norm(query, part["q_norm.weight"], config["layer_norm_eps"])
            key = rms_norm(key, part["k_norm.weight"], config["layer_norm_eps"])
        query, key, value = (rows.unflatten(-1, (-1, size)) for rows in (query, key, value))
        positions, base = torch.arange(len(x)), config["rope_theta"]
        query, key = rotate_half(query, positions, base), rotate_half(key, positions, base)
        return linear(attention(query, key, value, causal(len(x))), part, "attn_out")

    def _feed_forward(self, x: Tensor, part: dict[str, Tensor]) -> Tensor:
        up, gate = linear(x, part, "ff_proj").chunk(2, dim=-1)
        return linear(functional.silu(gate) * up, part, "ff_out")
