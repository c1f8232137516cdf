"""ChatGLM-6B against the reference implementation; what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.families import registry
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.templates.processes import TemplateRefusal
from tests.reference_models.text_models.chatglm_6b import ChatGlm6B, write_checkpoint
from tests.support.chat_templates import chat_template
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)

NEW_TOKENS = 12
MAX_LEN = 96
TALK = [("user", "What?"), ("assistant", "Dogs."), ("user", "And this?")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ChatGlm6B:
    return ChatGlm6B(write_checkpoint(tmp_path_factory.mktemp("chatglm-6b") / "model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("chatglm-6b") / "model")


@pytest.fixture(scope="module")
def prompts(reference: ChatGlm6B) -> list[list[int]]:
    """Eight of different lengths, some of which begin alike; of one the mask is not the last before the answer."""
    talks = [TALK[:1], TALK, [("user", "The red circle. " * 2)], [("user", "The red circle")]]
    ids = [reference.prompt_ids(talk) for talk in talks]
    mask, begin = ids[0][-2:]
    return [
        *ids,
        [mask, *ids[0][:-2], begin],
        [*ids[1][:20], mask, begin, *ids[1][:3]],
        [*ids[3][:1], mask, begin],
        [*ids[2][:-2], *ids[0]],
    ]


async def test_tokens_are_those_of_the_reference(
    folder: Path, reference: ChatGlm6B, prompts: list[list[int]], short_tmp: Path
) -> None:
    async with (
        running_decoder(folder, short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(prompts)]
        scheduler = NaiveScheduler(stream)
        await scheduler.generate(texts[:1], NEW_TOKENS, chunk=MAX_LEN)
        await scheduler.generate(texts, NEW_TOKENS, chunk=MAX_LEN)
    for text in texts:
        expected = reference.generate(text.prompt, NEW_TOKENS)
        assert_same_up_to_ties(text.output, expected.tokens, expected.logits)


async def test_masks_lie_before_the_answers_beginning_where_no_file_names_them(
    tmp_path: Path, reference: ChatGlm6B, prompts: list[list[int]], short_tmp: Path
) -> None:
    """As in the first release."""
    folder = write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["mask_token_id"], config["gmask_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    async with (
        running_decoder(folder, short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        text = Text(0, prompts[4], greedy())  # whose mask is the first token
        await NaiveScheduler(stream).generate([text], NEW_TOKENS, chunk=MAX_LEN)
    expected = reference.generate(text.prompt, NEW_TOKENS)
    assert_same_up_to_ties(text.output, expected.tokens, expected.logits)


def test_the_chat_format_has_rounds(reference: ChatGlm6B, folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    source = registry.find(checkpoint).chat_template(checkpoint)
    assert source is not None
    template = chat_template(source, {})
    for talk in (TALK[:1], TALK):
        messages = [{"role": role, "content": text} for role, text in talk]
        assert template.render(messages, True) == f"{reference.prompt(talk)}[gMASK]<sop>"
    with pytest.raises(TemplateRefusal, match="user and assistant alone"):
        template.render([{"role": "system", "content": "Be brief."}], True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_encoding_2d": False}, "position_encoding_2d"),
        ({"pre_seq_len": 128}, "pre_seq_len"),
        ({"quantization_bit": 8}, "quantization_bit"),
        ({"num_attention_heads": 31}, "heads"),
    ],
)
def test_another_block_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InvalidRequest, match=message):
        registry.decoder_config(Checkpoint(folder))
