"""A fine-tune under its predecessor's name, with real decoders, against transformers."""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_greedy
from tests.support.scheduler_bench import Bench

PROMPT = list(range(5, 40))
COUNT = 150
PLAIN: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint, a copy of it, and one that differs in a down_proj alone."""
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("checkpoints")
    found = {name: base / name for name in ("first", "copy", "tuned")}
    make_checkpoint(found["first"], "llama")
    for name in ("copy", "tuned"):
        shutil.copytree(found["first"], found[name])
    file = found["tuned"] / "model.safetensors"
    tensors = load_file(file)
    (name, *_) = sorted(name for name in tensors if "down_proj" in name)
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    return found


async def decoder(bench: Bench, folder: Path, name: str, place: Path) -> tuple[Any, Any]:
    """A running one, and what ends it."""
    stack = await bench.stack.enter_async_context(contextlib.AsyncExitStack())
    listen = place / f"{name}.sock"
    running = await bench.real_decoder(
        folder, listen, name=name, stack=stack, dtype="float32", threads=1
    )
    return running, stack


async def lose_the_one_that_runs(
    bench: Bench, decoders: dict[str, tuple[Any, Any]], rid: str
) -> str:
    """Waits for the first tokens and ends the decoder that made them."""
    async with asyncio.timeout(60):
        while True:
            state = await bench.queue.lookup(rid, "")
            assert state is not None and state.state != "ended"
            if state.tokens[0] >= 3:
                break
            await asyncio.sleep(0)
    (name,) = [n for n, (running, _) in decoders.items() if running.loaded.worker.slots.known.any()]
    await decoders[name][1].aclose()
    return name


async def test_an_answer_goes_on_with_equal_weights(
    bench: Bench, folders: dict[str, Path], short_tmp: Path
) -> None:
    decoders = {
        name: await decoder(bench, folders[name], name, short_tmp) for name in ("first", "copy")
    }
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=COUNT, **PLAIN)
    lost = await lose_the_one_that_runs(bench, decoders, rid)
    tokens, ending = await bench.answer(rid)
    assert not ending.HasField("failure"), (lost, ending)
    assert len(tokens) == COUNT
    assert_greedy(load_reference(folders["first"]), PROMPT, tokens)


async def test_an_answer_is_not_continued_by_a_fine_tune(
    bench: Bench, folders: dict[str, Path], short_tmp: Path
) -> None:
    decoders = {"tuned": await decoder(bench, folders["tuned"], "tuned", short_tmp)}
    decoders["first"] = await decoder(bench, folders["first"], "first", short_tmp)
    fingerprints = {running.loaded.fingerprint for running, _ in decoders.values()}
    assert len(fingerprints) == 1 and len({d[0].loaded.content for d in decoders.values()}) == 2
    bench.scheduler(changed_model_timeout=0.5)
    rid = await bench.ask(PROMPT, max_tokens=COUNT, **PLAIN)
    assert await lose_the_one_that_runs(bench, decoders, rid) == "first"  # it was loaded last
    tokens, ending = await bench.answer(rid)
    assert ending.failure.reason == "MODEL_CHANGED"
    before, after = (load_reference(folders[name]) for name in ("first", "tuned"))
    assert_greedy(before, PROMPT, tokens)
    # The same prompt again: with the fine-tune's own keys and values, from the first token on.
    again, _ = await bench.answer(await bench.ask(PROMPT, max_tokens=COUNT, **PLAIN))
    assert_greedy(after, PROMPT, again)
    with pytest.raises(AssertionError):
        assert_greedy(before, PROMPT, again)
