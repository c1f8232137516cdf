"""Types of transformers that take pictures and that nothing here was written for: `tessera check` says what serving
does, and what is served gives the tokens of the class's own `generate`, with one picture and with two.
"""

import asyncio
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from PIL import Image

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.launcher import check
from shared.errors import InvalidRequest
from tests.support.checkpoints import (
    GENERIC,
    any_picture_type,
    generic,
    load_reference,
    make_checkpoint,
)
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import data_url, png
from tests.support.processes.services_in_process import services_in_process

NEW_TOKENS = 8
SERVED = ("cosmos3_edge", "deepseek_vl", "got_ocr2", "hyperclovax_vision_v2")
REFUSED = {
    "blip": "it has no token for an image",
    "cohere2_vision": "alone, not for Pillow",
    "cosmos3_omni": "transformers has no processor",
    "granite4_vision": "only rows for layers of its choice",
    "idefics2": "does not say what it writes in the place of a picture",
    "kimi_k25": "alone, not for Pillow",
    "lfm2_vl": "alone, not for Pillow",
    "mistral3": "import of torch halted",
    "paligemma": "needs a prompt rule of its own",
    "video_llama_3": "cannot be served",
    "video_llava": "its encoder fails on a picture",
}


def build(folder: Path, kind: str) -> Path:
    return (make_checkpoint if kind in GENERIC else any_picture_type.build)(folder, kind)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", SERVED)
def test_one_and_two_pictures_give_the_tokens_of_generate(
    kind: str, tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    folder = build(tmp_path / "under-test", kind)
    assert check.main([str(folder)]) == 0
    assert "compared prompts with pictures" in capsys.readouterr().out
    asked = [[png(1, (80, 60))], [png(2, (90, 40)), png(3, (50, 120))]]

    async def ask(url: str) -> list[Any]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return [
                await client.chat.completions.create(
                    model="under-test",
                    messages=messages(pictures),
                    max_tokens=NEW_TOKENS,
                    temperature=0,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                for pictures in asked
            ]

    with services_in_process(folder, redis_url) as system:
        answers = asyncio.run(ask(system.base_url))
    model: Any = load_reference(folder)
    processor: Any = generic.processor(folder)
    for pictures, answer in zip(asked, answers, strict=True):
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": [*[{"type": "image"}] * len(pictures), parts([])[0]]}],
            tokenize=False,
        )
        opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
        inputs = generic.inputs(folder, text, opened)
        prompt = inputs["input_ids"][0].tolist()
        assert answer.prompt_token_ids == prompt
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            # Of some processors users have to ask for them.
            takes_row = torch.isin(inputs["input_ids"], torch.tensor(generic.row_ids(folder)))
            inputs["mm_token_type_ids"] = takes_row.long()
        with torch.no_grad():
            found = model.generate(
                **inputs,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_scores=True,
            )
        expected = found.sequences[0, len(prompt) :].tolist()
        assert_same_up_to_ties(answer.choices[0].token_ids, expected, torch.cat(found.scores))


def messages(pictures: list[bytes]) -> Any:
    return [{"role": "user", "content": parts(pictures)}]


def parts(pictures: list[bytes]) -> list[dict[str, Any]]:
    shown = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in pictures]
    return [*shown, {"type": "text", "text": "What is it?"}]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", REFUSED)
def test_check_refuses_what_is_not_served(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build(tmp_path / "under-test", kind)
    assert check.main([str(folder)]) == 1
    said = capsys.readouterr().out
    assert REFUSED[kind] in said
    with pytest.raises(InvalidRequest) as refused:
        load(DecoderSettings(model=folder, threads=1))
    assert refused.value.message in said
