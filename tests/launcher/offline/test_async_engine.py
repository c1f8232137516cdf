"""The engine with an event loop, as vLLM's programs use theirs."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera import AsyncEngineArgs, AsyncLLMEngine, RequestOutput, SamplingParams

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncLLMEngine]:
    args = AsyncEngineArgs(folder, dtype="float32", max_model_len=512, language_model_only=True)
    with AsyncLLMEngine.from_engine_args(args) as running:
        yield running


async def test_outputs_are_cumulative_and_the_last_one_is_finished(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    found: list[RequestOutput] = []
    async for output in engine.generate(
        inputs="The red circle", sampling_params=params, request_id="one"
    ):
        found.append(output)
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    assert {output.request_id for output in found} == {"one"}
    texts = [output.outputs[0].text for output in found]
    assert len(found) > 1
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(found[-1].outputs[0].token_ids) == 120
    again = [one async for one in engine.generate("The red circle", params, "two")]
    assert again[-1].outputs == found[-1].outputs


async def test_abort_ends_a_request_and_no_other(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def last(prompt: str, name: str, abort: bool) -> RequestOutput:
        output = None
        async for output in engine.generate(prompt=prompt, sampling_params=params, request_id=name):
            if abort and len(output.outputs[0].token_ids) >= 3:
                await engine.abort(name)
        assert output is not None
        return output

    aborted, whole = await asyncio.gather(last("red", "a", True), last("blue", "b", False))
    assert aborted.finished and aborted.outputs[0].finish_reason == "abort"
    assert 3 <= len(aborted.outputs[0].token_ids) < 400
    assert whole.outputs[0].finish_reason == "length" and len(whole.outputs[0].token_ids) == 400
    await engine.abort("nobody")


async def test_what_cannot_be_asked_says_why(engine: AsyncLLMEngine) -> None:
    with pytest.raises(TypeError, match="either prompt or inputs"):
        await anext(engine.generate())
    open_one = engine.generate("red", SamplingParams(max_tokens=400), "same")
    await anext(open_one)
    with pytest.raises(ValueError, match="another open request"):
        await anext(engine.generate("red", None, "same"))
    await open_one.aclose()
    assert (await anext(engine.generate("red", None, "same"))).request_id == "same"
