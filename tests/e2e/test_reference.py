"""Greedy float32 output of the whole system, token for token that of transformers.

Each case is a random checkpoint, sixteen requests at once with prompts of mixed lengths and, for vision models, no,
one or several pictures; prompt ids and generated ids both come back through the REST endpoint. By default three
families with parts of ours run, and one by the code of transformers; the decoder's own tests compare every text family.
"""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.checkpoints import GENERIC, load_reference, make_checkpoint, reference_inputs
from tests.support.checkpoints.generic import MOST_IMAGES
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import animation, data_url, png
from tests.support.processes.services_in_process import services_in_process

NEW_TOKENS = 24
WORDS = ["the", "red", "circle", "is", "left", "of", "a", "blue", "square", "图中有一个圆形", "and"]

SIZES = [(40, 200), (5, 5), (400, 9), (200, 160), (12, 300), (57, 113), (640, 480)]

WORDS_ALONE = (
    "{% for turn in messages %}{% for part in turn['content'] if part['type'] == 'text' %}{{ part['text'] }} "
    "{% endfor %}{% endfor %}"
)

CASES: dict[str, dict[str, Any]] = {
    "llama-gqa-tied-llama3-rope": {
        "family": "llama",
        "text": {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "qwen2-linear-rope-sharded": {
        "family": "qwen2",
        "shard_bytes": 40_000,
        "text": {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    },
    "llava-clip-llama-old-names": {"family": "llava", "spelling": "old", "shard_bytes": 60_000},
    "llava-clip-gemma2-by-transformers": {"family": "llava", "language": "gemma2"},
    "mistral-window": {"family": "mistral", "text": {"sliding_window": 12, "head_dim": 24}},
    "qwen3-tied-window-in-a-layer": {
        "family": "qwen3",
        "text": {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 1,
        },
    },
    "llava-siglip-qwen2-new-names": {
        "family": "llava",
        "tower": "siglip",
        "language": "qwen2",
        "spelling": "new",
    },
    "llava-next-clip-mistral-old-names": {
        "family": "llava_next",
        "language": "mistral",
        "spelling": "old",
    },
    "qwen2-vl-old-config": {"family": "qwen2_vl", "old_rope": True},
    "qwen2.5-vl-tied-sharded-new-names": {
        "family": "qwen2_5_vl",
        "spelling": "new",
        "shard_bytes": 60_000,
        "text": {"tie_word_embeddings": True},
    },
    "chatglm": {"family": "chatglm"},
    "glm4": {"family": "glm4"},
    "internvl-chat-internlm2": {"family": "internvl_chat", "language": "internlm2"},
    "internvl-chat-qwen2": {"family": "internvl_chat", "language": "qwen2"},
    "llava-next-siglip-qwen3-new-names": {
        "family": "llava_next",
        "tower": "siglip",
        "language": "qwen3",
        "spelling": "new",
    },
    "idefics3-transformers-llama": {"family": "idefics3"},
    "llava-onevision-transformers-qwen2": {"family": "llava_onevision"},
    "qwen3-vl-transformers": {"family": "qwen3_vl"},
    "gemma3-transformers": {"family": "gemma3"},
    "chameleon-transformers": {"family": "chameleon"},
    "molmo2-transformers": {"family": "molmo2"},
    "ovis2-transformers-qwen2": {"family": "ovis2"},
    "ernie4.5-vl-moe-transformers": {"family": "ernie4_5_vl_moe"},
    "mllama-transformers-and-ours": {"family": "mllama"},
    "blip2-transformers-opt": {"family": "blip2", "template": WORDS_ALONE},
    "fuyu-transformers-persimmon": {"family": "fuyu", "template": WORDS_ALONE},
}

BY_DEFAULT = {
    "qwen2.5-vl-tied-sharded-new-names",
}


def conversations(most_images: int, with_videos: bool) -> list[list[dict[str, Any]]]:
    """Sixteen: short and long, system prompts, several turns, pictures and videos before, after and
    between words.
    """
    chats = []
    for i in range(16):
        text = " ".join(WORDS[j % len(WORDS)] for j in range(1 + i * i % 47))
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for j in range(min(i % 4, most_images)):
            size = (144, 144) if j else SIZES[i % len(SIZES)]
            parts.insert((i + j) % (len(parts) + 1), {"type": "image", "png": png(3 * i + j, size)})
        if with_videos and i % 3 == 1:
            frames = [png(7 * i + j, (80, 40 + 20 * (i % 2))) for j in range(1 + i % 6)]
            parts.insert(i % len(parts), {"type": "video", "frames": frames, "pace": 0.25 * i})
        chat: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if i % 5 == 0:
            chat.insert(0, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]})
        if i % 3 == 0:
            chat.append({"role": "assistant", "content": [{"type": "text", "text": "A circle."}]})
            chat.append({"role": "user", "content": [{"type": "text", "text": "And then?"}]})
        chats.append(chat)
    return chats


def for_openai(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def part(p: dict[str, Any]) -> dict[str, Any]:
        if p["type"] == "text":
            return p
        if p["type"] == "video":
            return {"type": "video_url", "video_url": video(p["frames"], p["pace"])}
        return {"type": "image_url", "image_url": {"url": data_url(p["png"])}}

    return [{"role": t["role"], "content": [part(p) for p in t["content"]]} for t in chat]


def video(frames: list[bytes], pace: float) -> dict[str, Any]:
    """As frames, or as an animated file if their number is even."""
    if len(frames) % 2:
        encoded = ",".join(base64.b64encode(frame).decode() for frame in frames)
        return {"url": f"data:video/jpeg;base64,{encoded}", "seconds_per_frame": pace}
    return {"url": data_url(animation(frames, int(1000 * pace)))}


async def ask(
    client: AsyncOpenAI, chat: list[dict[str, Any]], stream: bool
) -> tuple[list[int], list[int]]:
    """Prompt ids and generated ids, by a stream or in one piece."""
    request: dict[str, Any] = {
        "model": "under-test",
        "messages": for_openai(chat),
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    if not stream:
        answer: Any = await client.chat.completions.create(**request)
        return answer.prompt_token_ids, answer.choices[0].token_ids
    prompt: list[int] = []
    generated: list[int] = []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        prompt = getattr(chunk, "prompt_token_ids", None) or prompt
        for choice in chunk.choices:
            generated += getattr(choice, "token_ids", None) or []
    return prompt, generated


class Reference:
    """transformers, asked the same."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = load_reference(folder)
        self._folder = folder
        self._words = PreTrainedTokenizerFast.from_pretrained(folder)

    def __call__(self, chat: list[dict[str, Any]]) -> tuple[list[int], list[int], torch.Tensor]:
        text = self._words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        parts = [p for turn in chat for p in turn["content"]]
        images = [opened(p["png"]) for p in parts if p["type"] == "image"]
        videos = [
            ([opened(frame) for frame in p["frames"]], p["pace"])
            for p in parts
            if p["type"] == "video"
        ]
        more = {"videos": videos} if videos else {}
        inputs = reference_inputs(self._folder, text, images, **more)
        # BLIP-2's class takes no prompt without a picture.
        asks_text_alone = hasattr(self.model, "qformer") and not images
        model = self.model.language_model if asks_text_alone else self.model
        with torch.no_grad():
            output = model.generate(
                **inputs,
                attention_mask=torch.ones_like(inputs["input_ids"]),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_scores=True,
            )
        prompt = inputs["input_ids"][0].tolist()
        return prompt, output.sequences[0, len(prompt) :].tolist(), torch.cat(output.scores)


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


def has_videos(model: PreTrainedModel) -> bool:
    return hasattr(model.config, "video_token_id") and model.config.model_type not in GENERIC


def most_images(model: PreTrainedModel) -> int:
    kind = model.config.model_type
    if kind in MOST_IMAGES or kind in ("blip-2", "fuyu"):
        return MOST_IMAGES.get(kind, 1)
    takes_some = hasattr(model.config, "vision_config") or hasattr(model.config, "vq_config")
    return 3 if takes_some else 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.full) for n in CASES],
)
def test_sixteen_at_once_give_the_tokens_of_transformers(
    name: str, tmp_path: Path, redis_url: str
) -> None:
    torch.set_num_threads(1)
    folder = make_checkpoint(tmp_path / "under-test", **CASES[name])
    reference = Reference(folder)
    chats = conversations(most_images(reference.model), has_videos(reference.model))

    async def ask_all(url: str) -> list[tuple[list[int], list[int]]]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked = [ask(client, chat, stream=i % 2 == 0) for i, chat in enumerate(chats)]
            return await asyncio.gather(*asked)

    with services_in_process(folder, redis_url) as system:
        answers = asyncio.run(ask_all(system.base_url))
        again = asyncio.run(ask_all(system.base_url))
    ties = 0
    for chat, (prompt, generated) in zip(chats, answers, strict=True):
        expected_prompt, expected, logits = reference(chat)
        assert prompt == expected_prompt
        assert len(generated) == NEW_TOKENS
        assert_same_up_to_ties(generated, expected, logits)
        ties += generated != expected
    assert ties <= 1  # a tie is rare, not an excuse
    # Cached prefixes and another batch change nothing: float32 on a CPU is invariant.
    assert again == answers


def test_the_reference_depends_on_the_pictures(tmp_path: Path) -> None:
    """The comparison above would pass if neither side looked at the pictures; this one would not."""
    folder = make_checkpoint(tmp_path / "model", "llava")
    reference = Reference(folder)
    outputs = []
    for number in (1, 5):
        parts = [{"type": "image", "png": png(number)}, {"type": "text", "text": "the"}]
        outputs.append(reference([{"role": "user", "content": parts}])[2][0])
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
