"""WeMM-Chat-2K-CN, and WeMM-Chat-CN / WeMM-1.2 with stock Idefics2 preprocessing.

Assumption: a folder without `image_processor` in config.json has the stock processor, with the sizes
of preprocessor_config.json (378 and 980 where it names none), and is otherwise the same model.
Assumption: the stock folder's tower takes the older position ids too.
Assumption: the LoRA scale is lora_alpha / r of adapter_config.json, 1 without that file.
Assumption: several turns end each, the last included, in `<|im_end|>` and a newline; one user turn
alone has no newline there.
Assumption: <|im_start|> and <|im_end|> have the ids that the tokenizer gives them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
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
    layer_norm,
    linear,
    read_json,
    read_tensors,
    write_folder,
    write_json,
)
from tests.reference_models.image_processors import wemm_images
from tests.reference_models.text_models import internlm2

BEGIN, END = -300, -400
STRIDE = 4  # kernel and stride of the downsampler, root of the group of 16
RANK = 8


def write_checkpoint(
    folder: Path,
    *,
    stock: bool = False,
    lora_alpha: int = RANK,
    depth: int = 2,
    seed: int = 0,
    size: dict[str, int] | None = None,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Path:
    """A tiny checkpoint, with `original_linear.` in the names and the released tokenizer's layout.
    `depth` is that of the downsampler; `size` the processor's edges, `vision` and `text` change
    keys of those configurations.
    """
    size = size or {"shortest_edge": 112, "longest_edge": 280}
    vocab_size = internlm2_words.write_words(folder)
    internlm2_words.add_marks(folder)
    vision_config = {
        "model_type": "idefics2",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 980,
        "patch_size": 14,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    } | (vision or {})
    text_config = internlm2.text_config(vocab_size, **(text or {}))
    config = {
        "model_type": "wemm",
        "torch_dtype": "float16",
        "do_image_splitting": False,
        "vision_config": vision_config,
        "text_config": text_config,
        "image_processor": {"size": size},
        "spliter_emb_config": {"num_embeddings": 12, "embedding_dim": text_config["hidden_size"]},
        "downsampler_config": {
            "kernel_size": STRIDE,
            "stride": STRIDE,
            "visual_hidden_size": vision_config["hidden_size"],
            "llm_hidden_size": text_config["hidden_size"],
            "depth": depth,
            "hidden_act": "gelu",
            "bias": False,
        },
    }
    if stock:
        del config["image_processor"]
    tensors = _draw(config, Draw(seed))
    write_folder(folder, config, tensors, None)
    write_json(folder / "adapter_config.json", {"lora_alpha": lora_alpha, "r": RANK})
    if stock:
        processor = {"image_processor_type": "Idefics2ImageProcessor", "size": size}
        write_json(folder / "preprocessor_config.json", processor)
    return folder


def _draw(config: dict[str, Any], random: Draw) -> dict[str, Tensor]:
    vision, down = config["vision_config"], config["downsampler_config"]
    text = internlm2.draw(config["text_config"], random, dict.fromkeys(internlm2.LINEARS, RANK))
    tensors = {}
    for name, tensor in text.items():
        for part in internlm2.LINEARS:
            name = name.replace(f"{part}.weight", f"{part}.original_linear.weight")
        tensors[f"language_model.{name}"] = tensor
    sides = vision["image_size"] // vision["patch_size"]
    tensors |= towers.draw_embeddings(random, "vision_tower.", vision, sides**2)
    tensors |= towers.draw_layers(random, "vision_tower.", vision)
    tensors |= random.norm("vision_tower.post_layernorm", vision["hidden_size"])
    wide, hidden = vision["hidden_size"], down["llm_hidden_size"]
    tensors["downsampler.group_op.weight"] = random.weight(hidden, wide, STRIDE, STRIDE)
    for place in range(1, down["depth"]):
        name = f"downsampler.linear_model.{2 * place - 1}"
        tensors |= random.linear(name, hidden, hidden, bias=False)
    tensors["visual_source_spliter_emb.weight"] = random.weight(12, hidden)
    return tensors


def position_ids(rows: int, columns: int, sides: int) -> Tensor:
    """Rows of the position table [rows * columns], by the arithmetic of the older class.

    The step is rounded to float32 before `arange` takes it, as the count is a tensor there; with the
    double 1 / count other sides (25, 50, 55, ...) fall into other buckets.
    """
    boundaries = torch.arange(1 / sides, 1.0, 1 / sides)
    steps = [float(1 / torch.tensor(count)) for count in (rows, columns)]
    down, across = (
        torch.bucketize(torch.arange(0, 1 - 1e-6, step), boundaries, right=True) for step in steps
    )
    return (down[:, None] * sides + across).flatten()


class Wemm(Reference):
    """The model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        processor = read_json(folder / "preprocessor_config.json")
        self.stock = "image_processor" not in self.config
        chosen = processor if self.stock else self.config["image_processor"]
        self.size = chosen.get("size", {"shortest_edge": 378, "longest_edge": 980})
        self.words = internlm2_words.InternLM2Words(folder)
        tensors = {
            name.replace("original_linear.", ""): tensor
            for name, tensor in read_tensors(folder).items()
        }
        adapter = read_json(folder / "adapter_config.json") or {"lora_alpha": 1, "r": 1}
        scale = adapter["lora_alpha"] / adapter["r"]
        self.language = internlm2.InternLM2(
            self.config["text_config"],
            below(tensors, "language_model."),
            dict.fromkeys(internlm2.LINEARS, scale),
        )
        self.tensors = tensors

    def prompt_ids(self, turns: Sequence[Turn], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Chunk, BEGIN, a placeholder for each native row, END, chunk; at most one image."""
        chunks = self.prompt(turns).split(IMAGE)
        assert len(chunks) - 1 == len(sizes) <= 1, "one image at most, one marker for each"
        ids = self.words.encode(chunks[0], special=True)
        for (width, height), chunk in zip(sizes, chunks[1:], strict=True):
            rows, columns = wemm_images.grid(width, height, self.size, self.stock)
            count = -(-rows // STRIDE) * -(-columns // STRIDE)
            ids += [BEGIN, *[PLACEHOLDER] * count, END]
            ids += self.words.encode(chunk)
        return ids

    @staticmethod
    def prompt(turns: Sequence[Turn]) -> str:
        """The text; an image stands before its turn's text, on a line of its own."""
        newline = "" if len(turns) == 1 else "\n"
        parts = []
        for role, text in turns:
            if IMAGE in text:
                text = f"{IMAGE}\n{text.replace(IMAGE, '')}"
            parts.append(f"<|im_start|>{role}\n{text}<|im_end|>{newline}")
        return "".join(parts) + "<|im_start|>assistant\n"

    def pixel_values(self, image: Image) -> Tensor:
        """[3, H, W] float32."""
        return wemm_images.pixel_values(image, self.size, self.stock)

    def embed_image(self, image: Image) -> Tensor:
        """[native rows + 2, hidden]: first separator, downsampled map row by row, second one."""
        pixels = self.pixel_values(image)
        rows, columns = pixels.shape[1] // wemm_images.PATCH, pixels.shape[2] // wemm_images.PATCH
        native = self.downsample(self.tower(pixels).view(rows, columns, -1))
        separators = self.tensors["visual_source_spliter_emb.weight"]
        return torch.cat([separators[:1], native, separators[1:2]])

    def tower(self, pixels: Tensor) -> Tensor:
        """[patches, vision hidden], after the last norm."""
        config = self.config["vision_config"]
        tensors = below(self.tensors, "vision_tower.")
        eps, patch = config["layer_norm_eps"], config["patch_size"]
        x = towers.embed_patches(pixels, tensors, "embeddings.patch_embedding")
        rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
        places = position_ids(rows, columns, config["image_size"] // patch)
        x = x + tensors["embeddings.position_embedding.weight"][places]
        heads, act = config["num_attention_heads"], config["hidden_act"]
        x = towers.run_layers(x, tensors, heads, act, eps)
        return layer_norm(x, tensors, "post_layernorm", eps)

    def downsample(self, grid: Tensor) -> Tensor:
        """Map [rows, columns, vision hidden], edges repeated to multiples of 4, as [native rows,
        hidden].
        """
        rows, columns, _ = grid.shape
        config = self.config["downsampler_config"]
        image = functional.pad(
            grid.permute(2, 0, 1)[None], (0, -columns % STRIDE, 0, -rows % STRIDE), "replicate"
        )
        name = "downsampler.group_op"
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        x = functional.conv2d(image, weight, bias, stride=config["stride"])[0].flatten(1).T
        for place in range(1, config["depth"]):
            x = towers.activate(x, config["hidden_act"])
            x = linear(x, self.tensors, f"downsampler.linear_model.{2 * place - 1}")
        return x

    def logits(self, ids: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        """Logits [ids, vocabulary]. All negative ids are rows of the image, the separators too."""
        is_image = torch.tensor(ids) < 0
        return self.language.logits(fill_rows(ids, is_image, self.language.table, rows), is_image)
