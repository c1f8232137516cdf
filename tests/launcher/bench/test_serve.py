"""`tessera bench serve` against a server that the test plays, and against the real gateway."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer

from benchmarks.load.command import run
from benchmarks.load.errors import BenchError
from benchmarks.load.settings import BenchSettings
from services.launcher import cli
from tests.support.gateway.stage import MODEL, open_stage, write_model
from tests.support.network.openai_like_server import Played, events, playing
from tests.support.tokenizers import byte_level_tokenizer


@pytest.fixture
async def server() -> AsyncIterator[Played]:
    async with playing() as played:
        yield played


def settings(server: Played, **changes: Any) -> BenchSettings:
    values = {"base_url": server.url, "num_prompts": 6, "num_warmups": 0, "random_input_len": 8}
    return BenchSettings(**{**values, "random_output_len": 5, **changes})


def measured(server: Played) -> list[dict[str, Any]]:
    """The bodies after the probe."""
    return server.bodies[1:]


async def test_random_prompts_of_token_ids(server: Played, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = await run(settings(server, output=file, num_warmups=2, save_detailed=True))
    assert (result.completed, result.failed) == (6, 0)
    assert (result.output_tokens, result.input_tokens, result.cached_tokens) == (30, 42, 18)
    assert set(server.paths) == {"/v1/completions"}
    assert len(server.bodies) == 1 + 2 + 6
    for body in server.bodies:
        assert body["ignore_eos"] and body["stream"] and body["return_token_ids"]
        assert len(body["prompt"]) == 8
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 9  # warm-ups are others
    content = json.loads(file.read_text())
    assert content["completed"] == 6 and content["total_output_tokens"] == 30
    assert content["model_id"] == "played" and content["request_rate"] == "inf"
    assert content["mean_ttft_ms"] > 0 and content["p99_itl_ms"] >= 0
    assert [len(r["events_ms"]) for r in content["requests"]] == [5] * 6


async def test_equal_seeds_send_equal_requests(server: Played) -> None:
    for seed in (1, 1, 2):
        await run(settings(server, seed=seed, random_range_ratio=0.5, concurrency=1))
    first, second, third = (server.bodies[n * 7 : n * 7 + 7] for n in range(3))
    assert first == second != third
    lengths = {len(body["prompt"]) for body in server.bodies}
    assert len(lengths) > 1 and min(lengths) >= 4 and max(lengths) <= 12


async def test_closed_loop_keeps_to_its_lanes_and_connections(server: Played) -> None:
    server.pause_s = 0.002
    result = await run(settings(server, max_concurrency=2, num_prompts=8))
    assert result.completed == 8
    assert server.most_at_once == 2
    assert server.connections == 2


async def test_a_bound_holds_at_a_rate_too(server: Played) -> None:
    server.pause_s = 0.005
    result = await run(settings(server, request_rate=1000, concurrency=3, arrivals="constant"))
    assert result.completed == 6
    assert server.most_at_once <= 3


async def test_open_loop_does_not_wait_for_answers(server: Played) -> None:
    server.pause_s = 0.02
    result = await run(settings(server, request_rate=500.0))
    assert result.completed == 6
    assert server.most_at_once > 3


async def test_several_tokens_an_event(server: Played) -> None:
    server.answer = lambda body: events(body["max_tokens"], each=3)
    result = await run(settings(server, random_output_len=10))
    assert result.output_tokens == 60


@pytest.mark.parametrize("framing", ["chunked", "close"])
async def test_a_server_without_extensions(server: Played, framing: str) -> None:
    # As llama.cpp's: no ids, no usage, carriage returns.
    server.framing = framing
    server.answer = lambda body: events(body["max_tokens"], ids=False, usage=False, end=b"\r\n\r\n")
    result = await run(settings(server, prompts="words"))
    assert (result.completed, result.failed) == (6, 0)
    assert result.output_tokens == 30
    assert measured(server)[0]["prompt"].count(" ") == 7


async def test_a_server_that_refuses_token_ids_is_asked_without(
    server: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuses = ("return_token_ids",)
    server.answer = lambda body: events(body["max_tokens"], ids=False)
    result = await run(settings(server))
    assert result.output_tokens == 30
    assert "counted by events" in capsys.readouterr().err
    assert all("return_token_ids" not in body for body in server.bodies[1:])


async def test_any_other_refusal_is_said_and_ends_it(server: Played) -> None:
    server.refuses = ("ignore_eos",)
    with pytest.raises(BenchError, match="ignore_eos is unknown"):
        await run(settings(server))
    assert (await run(settings(server, ignore_eos=False))).completed == 6


async def test_failures_are_counted_by_reason(
    server: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    error = b'data: {"error": {"message": "decoder lost"}}\n\n'
    answers = iter([[events(2)[0]]] + [[events(2)[0], error]] * 2 + [[]] + [events(2)] * 3)
    server.answer = lambda body: next(answers)
    result = await run(settings(server, concurrency=1))
    assert (result.completed, result.failed) == (3, 3)
    assert result.errors == {"decoder lost": 2, "the answer has no tokens": 1}
    assert "2 x decoder lost" in capsys.readouterr().out


async def test_a_server_that_leaves_fails_its_requests(server: Played) -> None:
    cut = iter([events(2), [b"data: {"], events(2)])

    async def reply(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        pieces = next(cut)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
        writer.write(pieces[0])
        await writer.drain()
        writer.close()

    assert (await run(settings(server, num_prompts=1))).completed == 1
    server._reply = reply  # type: ignore[method-assign]
    with pytest.raises(BenchError, match="in the middle of an answer"):
        await run(settings(server, model="m"))


async def test_shared_prefixes(server: Played) -> None:
    await run(settings(server, shared_prefix_tokens=6, num_prefixes=2, concurrency=1))
    prompts = [body["prompt"] for body in measured(server)]
    assert {len(prompt) for prompt in prompts} == {14}
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 2
    assert prompts[0][:6] == prompts[2][:6] == server.bodies[0]["prompt"][:6]
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 6


@pytest.mark.parametrize("repeat", [False, True])
async def test_pictures(server: Played, repeat: bool) -> None:
    chat = {"backend": "openai-chat", "images": 2, "image_size": "40x24", "num_prompts": 3}
    await run(settings(server, repeat_images=repeat, **chat))
    assert set(server.paths) == {"/v1/chat/completions"}
    urls = []
    for body in measured(server):
        *pictures, text = body["messages"][0]["content"]
        assert text["type"] == "text" and len(pictures) == 2
        urls += [picture["image_url"]["url"] for picture in pictures]
    assert len(set(urls)) == (2 if repeat else 6)
    data = base64.b64decode(urls[0].removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(data)).size == (40, 24)


async def test_a_dataset(server: Played, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": "Hello", "output_tokens": 3}, {"prompt": [4, 5]}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    await run(settings(server, dataset_path=file, num_prompts=3, concurrency=1))
    bodies = measured(server)
    assert [body["prompt"] for body in bodies] == ["Hello", [4, 5], "Hello"]
    assert [body["max_tokens"] for body in bodies] == [3, 5, 3]
    assert "ignore_eos" not in bodies[0]
    for bad in ("{", "[]", "{}", '{"prompt": ""}', '{"prompt": "a", "output_tokens": 0}'):
        file.write_text(bad)
        with pytest.raises(BenchError, match="line 1"):
            await run(settings(server, dataset_path=file))


async def test_a_tokenizer_makes_words_exact(server: Played, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    folder = write_model(tmp_path / "model", tokenizer)
    wanted = {"prompts": "words", "tokenizer": folder, "random_input_len": 50}
    await run(settings(server, **wanted))
    for body in measured(server):
        assert len(tokenizer.encode(body["prompt"], add_special_tokens=False).ids) == 50


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_the_real_gateway(
    redis_url: str, tmp_path: Path, tokenizer: Tokenizer, backend: str
) -> None:
    folder = write_model(tmp_path / MODEL, tokenizer)
    async with open_stage(redis_url, folder, tokenizer) as stage:
        ids = stage.says("The red circle stands left of the blue square. " * 3, size=2)
        result = await run(
            BenchSettings(
                base_url=stage.gateway.url,
                backend=backend,
                num_prompts=12,
                max_concurrency=4,
                random_input_len=16,
                random_output_len=len(ids),
                goodput=["ttft:60000"],
            )
        )
    assert (result.completed, result.failed, result.good) == (12, 0, 12)
    assert result.output_tokens == 12 * len(ids)
    assert result.input_tokens >= 12 * 16


async def test_the_command_as_it_is_typed(
    server: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-prompts", "8", "--concurrency", "2", "--slo", "ttft:60000,tpot:60000"]
    command = ["bench", "serve", "--base-url", f"{server.url}/v1", *flags]
    assert await asyncio.to_thread(cli.run, command) == 0
    printed = capsys.readouterr().out
    assert "requests completed   8" in printed
    assert "(100.0% of all)" in printed
    server.answer = lambda body: []
    assert await asyncio.to_thread(cli.run, [*command, "--num-warmups", "0"]) == 1


def test_bench_is_a_command_with_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench"]) == 2
    assert cli.run(["bench", "--help"]) == 0
    assert "bench serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--images", "1"], "openai-chat"),
        (["--backend", "openai-chat", "--prompts", "ids"], "words"),
        (["--goodput", "speed:3"], "ttft"),
        (["--request-rate", "0"], "--request-rate"),
        (["--image-size", "big"], "--image-size"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        cli.run(["bench", "serve", *flags])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_away_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "nobody answers at 127.0.0.1:9" in capsys.readouterr().err
    assert cli.run(["bench", "serve", "--base-url", "somewhere"]) == 1
    assert "is not an address" in capsys.readouterr().err
