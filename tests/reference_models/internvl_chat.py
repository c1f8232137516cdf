"""InternVLChat in the layout of its first releases: InternViT, pixel shuffle, mlp1, a language model.

The language model is InternLM2 or one of transformers' classes, by `llm_config.architectures`.

A turn is `<|im_start|>{role}`, a newline, the text and `<|im_end|>`, with a newline after it in the template
internvl2_5 alone; without a system turn there is `system_message` of config.json, else that of the template
(conversation.py of OpenGVLab/InternVL @ 2410d1d).
Assumption: an image is <img>, <IMG_CONTEXT> for each row, </img>, where its marker stands.
Assumption: tiles are PIL's bicubic, normalised with ImageNet's numbers, row by row; the whole image
as one more comes last, unless there is one tile alone; keys min_dynamic_patch, max_dynamic_patch,
use_thumbnail, dynamic_image_size.
Assumption: attn.qkv is all q, all k, all v; q_norm and k_norm act on all heads together; ps_version
v1 lists the cells column by column, v2 row by row, both pack a cell's patches row by row.
Assumption: select_layer counts among the outputs of the embeddings and all layers; no last norm.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL.Image import Image, Resampling
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from tests.reference_models import internlm2_words, towers, words
from tests.reference_models.common import (
    IMAGE,
    Draw,
    Reference,
    Turn,
    attention,
    below,
    fill_rows,
    layer_norm,
    linear,
    read_json,
    read_tensors,
    rms_norm,
    write_folder,
)
from tests.reference_models.text_models import internlm2
from tests.support.tokenizers import token_id

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# The system texts of InternVL2, and of 2.5 and 3.
SYSTEMS = {
    "internlm2-chat": "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，"
    "英文名叫InternVL, 是一个有用无害的人工智能助手。",
    "internvl2_5": "你是书生·万象，英文名是InternVL，"
    "是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。",
}
SPECIAL = ("<img>", "</img>", "<IMG_CONTEXT>", "<|im_start|>", "<|im_end|>")


def write_checkpoint(
    folder: Path,
    *,
    language: str = "Qwen2",
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A tiny checkpoint with Qwen2, Llama or InternLM2; `changes` of keys of config.json, `text` and
    `vision` of those configurations.
    """
    vocab_size = (text or {}).get("vocab_size", 500)
    llm = internlm2.text_config(**{"vocab_size": vocab_size, **(text or {})})
    llm["architectures"] = [f"{language}ForCausalLM"]
    llm["model_type"] = language.lower()
    vision_config = {
        "model_type": "intern_vit_6b",
        "architectures": ["InternVisionModel"],
        "hidden_act": "gelu",
        "hidden_size": 64,
        "image_size": 56,
        "intermediate_size": 96,
        "layer_norm_eps": 1e-6,
        "norm_type": "layer_norm",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "patch_size": 14,
        "qk_normalization": False,
        "qkv_bias": True,
    } | (vision or {})
    config = {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": vision_config["image_size"],
        "max_dynamic_patch": 6,
        "min_dynamic_patch": 1,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internlm2-chat" if language == "InternLM2" else "internvl2_5",
        "use_thumbnail": True,
        "llm_config": llm,
        "vision_config": vision_config,
        "tie_word_embeddings": False,
    } | changes
    special = {token: vocab_size - 5 + place for place, token in enumerate(SPECIAL)}
    internlm = language == "InternLM2"
    tokenizer = (words.sentencepiece_words if internlm else words.byte_level_words)(special)
    random = Draw(seed)
    tensors = _draw_vision(vision_config, llm["hidden_size"], random) | _draw_text(llm, random)
    return write_folder(folder, config, tensors, tokenizer, eos_token="<|im_end|>")


def _draw_text(config: dict[str, Any], random: Draw) -> dict[str, Tensor]:
    if config["architectures"] == ["InternLM2ForCausalLM"]:
        tensors = internlm2.draw(config, random, {})
    else:
        tensors = {
            name: random.weight(*tensor.shape)
            if tensor.ndim > 1
            else tensor + random.bias(len(tensor))
            for name, tensor in text_class(config).state_dict().items()
        }
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def _draw_vision(config: dict[str, Any], wide: int, random: Draw) -> dict[str, Tensor]:
    hidden, patch = config["hidden_size"], config["patch_size"]
    rows = (config["image_size"] // patch) ** 2 + 1
    biased = config["norm_type"] == "layer_norm"
    tensors = {
        "embeddings.class_embedding": random.weight(1, 1, hidden),
        "embeddings.patch_embedding.weight": random.weight(hidden, 3, patch, patch),
        "embeddings.patch_embedding.bias": random.bias(hidden),
        "embeddings.position_embedding": random.weight(1, rows, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layers.{layer}."
        tensors |= random.linear(f"{name}attn.qkv", hidden, 3 * hidden, config["qkv_bias"])
        tensors |= random.linear(f"{name}attn.proj", hidden, hidden)
        tensors |= random.linear(f"{name}mlp.fc1", hidden, config["intermediate_size"])
        tensors |= random.linear(f"{name}mlp.fc2", config["intermediate_size"], hidden)
        tensors |= random.norm(f"{name}norm1", hidden, biased)
        tensors |= random.norm(f"{name}norm2", hidden, biased)
        tensors |= {f"{name}ls1": random.scale(hidden), f"{name}ls2": random.scale(hidden)}
        if config["qk_normalization"]:
            tensors |= random.norm(f"{name}attn.q_norm", hidden, bias=False)
            tensors |= random.norm(f"{name}attn.k_norm", hidden, bias=False)
    tensors = {f"vision_model.{name}": tensor for name, tensor in tensors.items()}
    tensors |= random.norm("mlp1.0", 4 * hidden)
    tensors |= random.linear("mlp1.1", 4 * hidden, wide)
    return tensors | random.linear("mlp1.3", wide, wide)


def text_class(config: dict[str, Any]) -> PreTrainedModel:
    """transformers' model for llm_config, with weights of its own."""
    (architecture,) = config["architectures"]
    kind = getattr(transformers, architecture)
    unused = ("architectures", "model_type", "rope_theta", "rope_scaling")
    keys = {key: value for key, value in config.items() if key not in unused}
    keys["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return kind(kind.config_class(**keys)).eval().requires_grad_(False)


def tile_counts(width: int, height: int, config: dict[str, Any]) -> tuple[int, int]:
    """(columns, rows) of tiles: the closest ratio of sides, of equals the one that the image fills
    more than half.
    """
    if not config["dynamic_image_size"]:
        return 1, 1
    least, most = config["min_dynamic_patch"], config["max_dynamic_patch"]
    sides = range(1, most + 1)
    candidates = sorted(
        ((columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most),
        key=lambda counts: counts[0] * counts[1],
    )
    best, smallest = (1, 1), float("inf")
    for columns, rows in candidates:
        difference = abs(width / height - columns / rows)
        filled = width * height > 0.5 * config["force_image_size"] ** 2 * columns * rows
        if difference < smallest or (difference == smallest and filled):
            best, smallest = (columns, rows), difference
    return best


def _tokenizer(folder: Path) -> tuple[Callable[..., list[int]], int]:
    """What encodes a text, and the id of a row: by tokenizer.model where the folder has one."""
    if (folder / "tokenizer.model").is_file():
        pieces = internlm2_words.InternLM2Words(folder)
        return pieces.encode, pieces.marks["<IMG_CONTEXT>"]
    tokenizer = words.read_tokenizer(folder)
    return partial(words.encode, tokenizer), token_id(tokenizer, "<IMG_CONTEXT>")


class InternVLChat(Reference):
    """The model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        self.encode, self.context = _tokenizer(folder)
        self.tensors = read_tensors(folder)
        language = below(self.tensors, "language_model.")
        self.internlm: internlm2.InternLM2 | None = None
        llm = self.config["llm_config"]
        if llm["architectures"] == ["InternLM2ForCausalLM"]:
            self.internlm = internlm2.InternLM2(llm, language, {})
        else:
            self.text = text_class(llm)
            self.text.load_state_dict(language)
        self.side = self.config["force_image_size"]

    def prompt_ids(self, turns: Sequence[Turn], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The whole text at once, with what the tokenizer puts around it."""
        first, *chunks = self.prompt(turns).split(IMAGE)
        text = first
        for size, chunk in zip(sizes, chunks, strict=True):
            text += f"<img>{'<IMG_CONTEXT>' * self.count_rows(*size)}</img>{chunk}"
        return self.encode(text, special=True)

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The text, with IMAGE where images stand."""
        end = "<|im_end|>\n" if self.config["template"] == "internvl2_5" else "<|im_end|>"
        system = self.config.get("system_message", SYSTEMS[self.config["template"]])
        whole = turns if turns[0][0] == "system" else [("system", system), *turns]
        parts = [f"<|im_start|>{role}\n{text}{end}" for role, text in whole]
        return "".join(parts) + "<|im_start|>assistant\n"

    def count_rows(self, width: int, height: int) -> int:
        """Embedding rows of an image of this size."""
        columns, rows = tile_counts(width, height, self.config)
        tiles = columns * rows
        tiles += 1 if tiles > 1 and self.config["use_thumbnail"] else 0
        return int(tiles * (self.side // self.config["vision_config"]["patch_size"] // 2) ** 2)

    def pixel_values(self, image: Image) -> Tensor:
        """[tiles, 3, side, side], the whole image last."""
        image, side = image.convert("RGB"), self.side
        columns, rows = tile_counts(*image.size, self.config)
        large = image.resize((columns * side, rows * side), Resampling.BICUBIC)
        corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
        tiles = [large.crop((x, y, x + side, y + side)) for x, y in corners]
        if len(tiles) > 1 and self.config["use_thumbnail"]:
            tiles.append(image.resize((side, side), Resampling.BICUBIC))
        return torch.stack([towers.to_pixels(tile, IMAGENET_MEAN, IMAGENET_STD) for tile in tiles])

    def embed_image(self, image: Image) -> Tensor:
        """[rows, hidden], tile after tile."""
        return torch.cat([self.project(self.tower(tile)) for tile in self.pixel_values(image)])

    def tower(self, pixels: Tensor) -> Tensor:
        """[patches, vision hidden] of one tile, without the class row."""
        config, tensors = self.config["vision_config"], below(self.tensors, "vision_model.")
        patches = towers.embed_patches(pixels, tensors, "embeddings.patch_embedding")
        x = torch.cat([tensors["embeddings.class_embedding"][0], patches])
        outputs = [x + tensors["embeddings.position_embedding"][0]]
        for layer in range(config["num_hidden_layers"]):
            x, part = outputs[-1], below(tensors, f"encoder.layers.{layer}.")
            x = x + self._attention(self._norm(x, part, "norm1"), part) * part["ls1"]
            y = linear(self._norm(x, part, "norm2"), part, "mlp.fc1")
            y = linear(towers.activate(y, config["hidden_act"]), part, "mlp.fc2")
            outputs.append(x + y * part["ls2"])
        chosen: int = self.config["select_layer"]
        return outputs[chosen][1:]

    def _norm(self, x: Tensor, part: dict[str, Tensor], name: str) -> Tensor:
        config = self.config["vision_config"]
        if config["norm_type"] == "rms_norm":
            return rms_norm(x, part[f"{name}.weight"], config["layer_norm_eps"])
        return layer_norm(x, part, name, config["layer_norm_eps"])

    def _attention(self, x: Tensor, part: dict[str, Tensor]) -> Tensor:
        config = self.config["vision_config"]
        query, key, value = linear(x, part, "attn.qkv").chunk(3, dim=-1)
        if config["qk_normalization"]:
            query = rms_norm(query, part["attn.q_norm.weight"], config["layer_norm_eps"])
            key = rms_norm(key, part["attn.k_norm.weight"], config["layer_norm_eps"])
        heads = config["num_attention_heads"]
        split = (rows.unflatten(-1, (heads, -1)) for rows in (query, key, value))
        return linear(attention(*split), part, "attn.proj")

    def shuffle(self, x: Tensor) -> Tensor:
        """Patches [n * n, c] as cells [(n / 2) ** 2, 4 c]."""
        half = int(len(x) ** 0.5) // 2
        cells = x.view(half, 2, half, 2, -1).transpose(1, 2).reshape(half, half, -1)
        if self.config["ps_version"] == "v1":
            cells = cells.transpose(0, 1)
        return cells.flatten(0, 1)

    def project(self, x: Tensor) -> Tensor:
        """Patches of a tile as rows of the language model."""
        y = linear(
            layer_norm(self.shuffle(x), self.tensors, "mlp1.0", 1e-5), self.tensors, "mlp1.1"
        )
        return linear(functional.gelu(y), self.tensors, "mlp1.3")

    def logits(self, ids: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        """Logits [ids, vocabulary]."""
        is_image = torch.tensor(ids) == self.context
        if self.internlm is not None:
            embeds = fill_rows(ids, is_image, self.internlm.table, rows)
            return self.internlm.logits(embeds, torch.zeros(len(ids), dtype=torch.bool))
        embeds = fill_rows(ids, is_image, self.text.get_input_embeddings().weight, rows)
        found: Tensor = self.text(inputs_embeds=embeds[None], use_cache=False).logits[0]
        return found
