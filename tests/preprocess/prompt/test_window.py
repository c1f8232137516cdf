"""`max_window_size`: which turns of a conversation are kept, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from shared.errors import InvalidRequest, from_failure
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    Message,
    PrepareManyRequest,
    PrepareManyResponse,
    PrepareRequest,
)
from tests.support.preprocess.service import (
    PreprocessMaker,
    RunningPreprocess,
    file_of,
    ids_of,
    image,
    picture,
    text,
    turn,
)

SYSTEM = turn("system", text("You answer."))
CALL = Message(
    role="assistant",
    tool_calls_json=json.dumps(
        [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
    ),
    is_string=True,
)
TURNS = [
    [turn("user", text("The red circle")), turn("assistant", text("stands left"))],
    [turn("user", text("of the blue square")), CALL, turn("tool", text("It is 4 wide"))],
    [turn("user", text("and")), turn("assistant", text("what is there?"))],
    [turn("user", text("The red circle?"))],
]


def chat(turns: list[list[Message]], window: int | None = None) -> PrepareRequest:
    messages = [SYSTEM, *(message for one in turns for message in one)]
    return PrepareRequest(conversation=Conversation(messages=messages), max_window_size=window)


async def lengths(service: RunningPreprocess, turns: list[list[Message]]) -> list[list[int]]:
    """The prompts of the newest turn, the newest two and so on."""
    newest = [turns[-count:] for count in range(1, len(turns) + 1)]
    return [ids_of(await service.prepare(chat(some, 0))) for some in newest]


async def many(service: RunningPreprocess, *requests: PrepareRequest) -> PrepareManyResponse:
    call = service.stub.PrepareMany()
    await call.write(PrepareManyRequest(prompts=requests))
    answer = await call.read()
    await call.done_writing()
    assert isinstance(answer, PrepareManyResponse)
    return answer


@pytest.mark.asyncio(loop_scope="module")
async def test_the_newest_whole_turns_that_fit_are_kept(llama_service: RunningPreprocess) -> None:
    prompts = await lengths(llama_service, TURNS)
    sizes = [len(prompt) for prompt in prompts]
    assert sizes == sorted(set(sizes))
    for window in range(sizes[0] + 1, sizes[-1] + 2):
        fitting = [prompt for prompt in prompts if len(prompt) < window][-1]
        assert ids_of(await llama_service.prepare(chat(TURNS, window))) == fitting, window
        together = (await many(llama_service, chat(TURNS, window))).results[0].prepared
        assert ids_of(together) == fitting
    too_small = chat(TURNS, sizes[0])
    with pytest.raises(InvalidRequest, match="the newest turn and the system message") as caught:
        await llama_service.prepare(too_small)
    assert caught.value.metadata["field"] == "max_window_size"
    failure = from_failure((await many(llama_service, too_small)).results[0].failure)
    assert failure.message == caught.value.message


async def test_a_long_history_is_cut_too(
    llama_folder: Path, make_preprocess: PreprocessMaker
) -> None:
    turns = [
        [turn("user", text(f"{number} red circle")), turn("assistant", text("blue " * 40))]
        for number in range(300)
    ] + [TURNS[-1]]
    async with make_preprocess(llama_folder, max_model_len=600) as service:
        found = ids_of(await service.prepare(chat(turns, 500)))
        assert 350 < len(found) < 500
        shorter = [ids_of(await service.prepare(chat(turns[-n:], 0))) for n in range(2, 10)]
        assert found in shorter
        assert len(shorter[shorter.index(found) + 1]) >= 500


@pytest.mark.asyncio(loop_scope="module")
async def test_pictures_count_and_those_of_turns_left_out_are_not_in_the_prompt(
    clip_service: RunningPreprocess,
) -> None:
    def shown(seed: int) -> list[Message]:
        return [
            turn("user", image(file_of(picture(seed=seed))), text("what is there?")),
            turn("assistant", text("blue")),
        ]

    turns = [shown(1), shown(2), [turn("user", text("and")), turn("assistant", text("red"))]]
    turns += [shown(3), TURNS[-1]]
    whole = [await clip_service.prepare(chat(turns[-n:], 0)) for n in range(1, len(turns) + 1)]
    for window in (len(ids_of(one)) + extra for one in whole for extra in (1, 9)):
        expected = [one for one in whole if len(ids_of(one)) < window][-1]
        found = await clip_service.prepare(chat(turns, window))
        assert ids_of(found) == ids_of(expected)
        assert [m.digest for m in found.media] == [m.digest for m in expected.media]
    with pytest.raises(InvalidRequest, match="the newest turn") as caught:
        await clip_service.prepare(chat([shown(1)], 12))
    assert int(caught.value.metadata["tokens"]) > 16


async def test_more_pictures_than_a_prompt_may_have_are_no_error_where_they_are_left_out(
    clip_folder: Path, make_preprocess: PreprocessMaker
) -> None:
    seen = [
        turn("user", image(file_of(picture(seed=1))), text("what")),
        turn("assistant", text("blue")),
    ]
    long = [turn("user", text("The red circle " * 20)), turn("assistant", text("and"))]
    turns = [seen, seen, long, seen, TURNS[-1]]
    async with make_preprocess(clip_folder, limit_mm_per_prompt="image=1") as service:
        with pytest.raises(InvalidRequest, match="at most 1 image"):
            await service.prepare(chat(turns, 0))
        window = len(ids_of(await service.prepare(chat(turns[-2:], 0)))) + 1
        assert len((await service.prepare(chat(turns, window))).media) == 1


async def test_the_default_is_the_flags_then_the_checkpoints(
    llama_folder: Path, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    async with make_preprocess(llama_folder) as service:
        prompts = await lengths(service, TURNS)
        assert ids_of(await service.prepare(chat(TURNS))) == prompts[-1]
    window = len(prompts[1]) + 1
    (folder / "generation_config.json").write_text(json.dumps({"max_window_size": window}))
    async with make_preprocess(folder) as service:
        assert ids_of(await service.prepare(chat(TURNS))) == prompts[1]
        assert ids_of(await service.prepare(chat(TURNS, 0))) == prompts[-1]
        # A prompt that is no conversation has no turns to leave out: the default is not for it.
        assert ids_of(await service.prepare(PrepareRequest(text="red " * 2 * window)))
    async with make_preprocess(folder, max_window_size=len(prompts[0]) + 1) as service:
        assert ids_of(await service.prepare(chat(TURNS))) == prompts[0]
    async with make_preprocess(folder, max_window_size=0) as service:
        assert ids_of(await service.prepare(chat(TURNS))) == prompts[-1]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_that_is_no_conversation_fits_or_is_refused(
    llama_service: RunningPreprocess,
) -> None:
    tokens = len(ids_of(await llama_service.prepare(PrepareRequest(text="The red circle"))))
    fits = PrepareRequest(text="The red circle", max_window_size=tokens + 1)
    assert len(ids_of(await llama_service.prepare(fits))) == tokens
    with pytest.raises(InvalidRequest) as caught:
        await llama_service.prepare(PrepareRequest(text="The red circle", max_window_size=tokens))
    assert caught.value.metadata["field"] == "max_window_size"
    cut = PrepareRequest(text="The red circle", max_window_size=9, keep_last_tokens=3)
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        await llama_service.prepare(cut)
