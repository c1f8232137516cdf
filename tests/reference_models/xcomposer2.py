"""InternLM-XComposer2: VL-7B and 4KHD-7B, which is told by the tensor `plora_glb_GN`.

The vision model is not described by config.json: CLIP ViT-L with 16 heads, eps 1e-5 and quick_gelu.

Assumption: white rows are added half above (rounded down) and half below the resized image.
Assumption: the high resolution resize is PIL's bilinear on 8-bit RGB, the square one of VL-7B PIL's
bicubic; the global view is torch's bicubic without antialiasing over the normalised pixels.
Assumption: the map is global lines, `plora_glb_GN`, local lines; cells of 2x2 patches are packed row
by row, each patch's channels together.
Assumption: hd_num is read from config.json, 25 where it is not there.
Assumption: hd_num's 25 is the default of the class (read in LMDeploy); the model card's example of 4KHD passes 55.
Read in LMDeploy: the default system text of VL (its four lines); quoted of PaddleMIX: that of the model of 224 pixels.
Quoted (PaddleMIX, bigdl, MindIE): each part of the text between pictures that is not empty begins with `<s>`.
Assumption: an earlier answer ends in [UNUSED_TOKEN_145] and a newline like any turn.
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch
from PIL import ImageOps
from PIL.Image import Image, Resampling, Transpose
from torch import Tensor
from torch.nn import functional

from tests.reference_models import internlm2_words, towers
from tests.reference_models.common import (
    IMAGE,
    PLACEHOLDER,
    Draw,
    Reference,
    Turn,
    below,
    fill_rows,
    linear,
    read_json,
    read_tensors,
    write_folder,
    write_json,
)
from tests.reference_models.text_models import internlm2

TILE = 336
TOWER = "vit.vision_tower.vision_model."
SYSTEM = [
    "You are an AI assistant whose name is InternLM-XComposer (浦语·灵笔).",
    "- InternLM-XComposer (浦语·灵笔) is a KIND conversational language model that is developed by Shanghai AI"
    " Laboratory (上海人工智能实验室). It is designed to be helpful, honest, and harmless.",
    "- InternLM-XComposer (浦语·灵笔) can understand and communicate fluently in the language chosen by the user such"
    " as English and 中文.",
    "- InternLM-XComposer (浦语·灵笔) is capable of comprehending and articulating responses effectively based on the"
    " provided image.",
]
END, START = internlm2_words.OLD_END, internlm2_words.OLD_START


def write_checkpoint(
    folder: Path,
    *,
    high_resolution: bool = False,
    img_size: int = 56,
    patch_size: int = 14,
    vision_hidden: int = 64,
    hd_num: int = 4,
    seed: int = 0,
    text: dict[str, Any] | None = None,
) -> Path:
    """A tiny checkpoint with the released tokenizer's layout, whose last two pieces are END and START. `img_size` is
    VL-7B's side, `hd_num` 4KHD's most tiles.
    """
    random, vocab_size = Draw(seed), internlm2_words.write_words(folder)
    config = internlm2.text_config(vocab_size, **(text or {})) | {
        "model_type": "internlm2",
        "architectures": ["InternLMXComposer2ForCausalLM"],
        "img_size": TILE if high_resolution else img_size,
        "max_length": 16384 if high_resolution else 4096,
    }
    if high_resolution:
        config["hd_num"] = hd_num
    vision = {
        "hidden_size": vision_hidden,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "patch_size": patch_size,
    }
    tensors = internlm2.draw(config, random, dict.fromkeys(internlm2.LINEARS, 8))
    side = config["img_size"] // patch_size
    tensors |= towers.draw_clip(random, TOWER, vision, side**2 + 1)
    wide, hidden = vision_hidden * (4 if high_resolution else 1), config["hidden_size"]
    tensors |= random.linear("vision_proj.0", wide, hidden)
    tensors |= random.linear("vision_proj.2", hidden, hidden)
    if high_resolution:
        tensors["plora_glb_GN"] = random.weight(1, 1, wide)
        tensors["plora_sub_GN"] = random.weight(1, 1, 1, wide)
    write_folder(folder, config, tensors, None)
    longest = 4480 if high_resolution else 1600
    write_json(folder / "generation_config.json", {"max_length": longest})
    return folder


def tiled_size(width: int, height: int, hd_num: int) -> tuple[int, int, int, int]:
    """Tile columns and rows, and the (width, height) of the image within them before padding."""
    if width < height:
        rows, columns, long, short = tiled_size(height, width, hd_num)
        return columns, rows, short, long
    ratio = width / height
    scale = 1
    while (scale + 1) * ceil((scale + 1) / ratio) <= hd_num:
        scale += 1
    inner = int(scale * TILE / ratio)
    return scale, ceil(inner / TILE), scale * TILE, inner


class XComposer2(Reference):
    """The model of a folder; `vision_heads` are the tower's, which no file names."""

    def __init__(self, folder: Path, vision_heads: int = 16) -> None:
        self.config = read_json(folder / "config.json")
        self.words = internlm2_words.InternLM2Words(folder)
        self.tensors = read_tensors(folder)
        self.high_resolution = "plora_glb_GN" in self.tensors
        self.hd_num = self.config.get("hd_num", 25)
        self.vision_heads = vision_heads
        self.patch = self.tensors[f"{TOWER}embeddings.patch_embedding.weight"].shape[-1]
        scales = dict.fromkeys(internlm2.LINEARS, 1.0)
        if self.high_resolution:
            scales["attention.wqkv"] = 2.0
        self.language = internlm2.InternLM2(self.config, self.tensors, scales)

    def prompt_ids(self, turns: Sequence[Turn], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Each part of the text by itself, `<s>` before it; placeholders between them."""
        chunks = self.prompt(turns).split(IMAGE)
        ids = self.words.encode(chunks[0], special=True)
        for size, chunk in zip(sizes, chunks[1:], strict=True):
            ids += [PLACEHOLDER] * self.count_rows(*size)
            ids += self.words.encode(chunk, special=True) if chunk else []
        return ids

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The text, with IMAGE where the released models write <ImageHere>."""
        if turns[0][0] != "system":
            lines = SYSTEM[:3] if self.config["img_size"] == 224 else SYSTEM
            kind = "" if self.config["img_size"] == 224 else " multi-modality"
            turns = [("system", "\n".join(lines).replace(" KIND", kind)), *turns]
        parts = [f"{START}{role}\n{text}{END}\n" for role, text in turns]
        return "".join(parts) + f"{START}assistant\n"

    def count_rows(self, width: int, height: int) -> int:
        """Embedding rows of an image of this size."""
        if not self.high_resolution:
            return int(self.config["img_size"] // self.patch) ** 2
        columns, rows, _, _ = tiled_size(width, height, self.hd_num)
        side = TILE // self.patch // 2
        return int((columns * rows + 1) * side**2 + 1 + (rows + 1) * side)

    def pixel_values(self, image: Image) -> Tensor:
        """[3, H, W]: VL-7B's square, or 4KHD's image in a white one of whole tiles."""
        image = image.convert("RGB")
        if not self.high_resolution:
            side = self.config["img_size"]
            image = image.resize((side, side), Resampling.BICUBIC)
        elif image.width < image.height:
            turned = self.tile(image.transpose(Transpose.TRANSPOSE))
            image = turned.transpose(Transpose.TRANSPOSE)
        else:
            image = self.tile(image)
        return towers.to_pixels(image, towers.CLIP_MEAN, towers.CLIP_STD)

    def tile(self, image: Image) -> Image:
        """A landscape image, resized and padded to whole tiles."""
        _, rows, width, height = tiled_size(*image.size, self.hd_num)
        missing = rows * TILE - height
        above = missing // 2
        image = image.resize((width, height), Resampling.BILINEAR)
        return ImageOps.expand(image, (0, above, 0, missing - above), "white")

    def embed_image(self, image: Image) -> Tensor:
        """[rows, hidden]."""
        pixels = self.pixel_values(image)
        features = self.tiles(pixels) if self.high_resolution else self.tower(pixels)
        x = functional.gelu(linear(features, self.tensors, "vision_proj.0"))
        return linear(x, self.tensors, "vision_proj.2")

    def tower(self, pixels: Tensor) -> Tensor:
        """[patches, vision hidden] of one square."""
        return towers.clip_features(pixels, below(self.tensors, TOWER), self.vision_heads)

    def tiles(self, pixels: Tensor) -> Tensor:
        """The global view's lines, a separator, the tiles' lines; each line ends in another one."""
        view = functional.interpolate(pixels[None], size=(TILE, TILE), mode="bicubic")[0]
        lines = [
            torch.cat([self.packed(tile) for tile in row.split(TILE, dim=2)], dim=1)
            for row in pixels.split(TILE, dim=1)
        ]
        return torch.cat(
            [
                self.with_line_ends(self.packed(view)),
                self.tensors["plora_glb_GN"][0],
                self.with_line_ends(torch.cat(lines)),
            ]
        )

    def packed(self, tile: Tensor) -> Tensor:
        """The features of a tile [side, side, 4 * vision hidden], 2x2 patches to a cell."""
        side = TILE // self.patch // 2
        features = self.tower(tile).view(side, 2, side, 2, -1)
        return features.transpose(1, 2).reshape(side, side, -1)

    def with_line_ends(self, grid: Tensor) -> Tensor:
        """The cells of a map, line after line, each with `plora_sub_GN` at its end."""
        ends = self.tensors["plora_sub_GN"][0].expand(len(grid), 1, -1)
        return torch.cat([grid, ends], dim=1).flatten(0, 1)

    def logits(self, ids: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        """Logits [ids, vocabulary]."""
        is_image = torch.tensor(ids) == PLACEHOLDER
        embeds = fill_rows(ids, is_image, self.language.table, rows)
        return self.language.logits(embeds, is_image)
