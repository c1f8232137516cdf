"""`tessera run-batch`: every line is answered once, also by a run that was interrupted."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from services.launcher.run_batch import command
from services.launcher.run_batch.journal import Journal
from services.launcher.run_batch.sending import Sender
from shared.net.backoff import Backoff
from shared.settings import child_environment, python_path
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage, write_model
from tests.support.pictures import png
from tests.support.tokenizers import byte_level_tokenizer

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"


@pytest.fixture
async def stage(redis_url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    tokenizer = byte_level_tokenizer()
    async with open_stage(redis_url, write_model(tmp_path / MODEL, tokenizer), tokenizer) as opened:
        yield opened


@contextlib.asynccontextmanager
async def run_batch(*arguments: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.launcher", "run-batch", *map(str, arguments)),
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(PYTHONPATH=python_path(ROOT, ROOT / "protos")),
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ran(*arguments: Any) -> tuple[int | None, str]:
    """The status of a whole run, and what it said."""
    async with run_batch(*arguments) as process:
        _, said = await process.communicate()
        return process.returncode, said.decode()


def line(name: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say {name}"}]
    body = {"model": MODEL, "messages": messages, **body}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    written = (one if isinstance(one, str) else json.dumps(one) for one in lines)
    path.write_text("\n".join(written), encoding="utf-8")
    return path


def results_of(path: Path) -> list[Any]:
    return [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()]


async def test_a_run_that_was_killed_goes_on(stage: Stage, tmp_path: Path) -> None:
    names = [str(number) for number in range(20)]
    source, target = write_lines(tmp_path / "in", map(line, names)), tmp_path / "out"
    journal = tmp_path / "out.journal"
    go_on = asyncio.Event()
    begun: list[str] = []

    async def step(rid: str, index: int) -> None:
        if index == 2:
            begun.append(rid)
            if len(begun) > 7:
                await go_on.wait()

    stage.scheduler.step = step
    where = ("--base-url", f"{stage.gateway.url}/v1")
    async with run_batch(source, target, *where) as process:
        async with asyncio.timeout(60):
            while len(begun) < 20 or journal.read_bytes().count(b"\n") < 8:
                await asyncio.sleep(0.02)
        status, said = await ran(source, target, *where)
        assert status == 1 and "another run writes" in said
        process.kill()
        await process.wait()
    with journal.open("ab") as torn:
        torn.write(b'9 0123 {"id": "half')
    assert not target.exists()
    go_on.set()
    status, said = await ran(source, target, *where)
    assert status == 0 and "goes on behind 7 of 20 lines" in said, said
    results = results_of(target)
    assert [one["custom_id"] for one in results] == names
    assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in results} == {
        ANSWER
    }
    assert len({one["response"]["request_id"] for one in results}) == 20
    assert len(stage.scheduler.played) == 20, "what was accepted was not asked for again"
    assert {*stage.scheduler.classes} == {"batch"} and not journal.exists()


async def test_lines_that_are_no_requests_cost_themselves_alone(
    stage: Stage, tmp_path: Path
) -> None:
    lines = [
        line("good"),
        "",
        "{no json",
        "[]",
        {**line("get"), "method": "GET"},
        {**line("nowhere"), "url": "/v1/nowhere"},
        line("streams", stream=True),
        line("hot", temperature=99),
    ]
    source, target = write_lines(tmp_path / "in", lines), tmp_path / "out"
    status, said = await ran(source, target, f"--base-url={stage.gateway.url}")
    assert status == 0 and "1 of 7 lines answered" in said, said
    results = results_of(target)
    assert [one["custom_id"] for one in results] == [
        "good", None, None, "get", "nowhere", "streams", "hot",
    ]  # fmt: skip
    said_of = [(one["error"] or {}).get("message", "") for one in results]
    assert ["line 3" in said_of[1], "line 7" in said_of[5]] == [True, True]
    statuses = [one["response"] and one["response"]["status_code"] for one in results]
    assert statuses == [200, None, None, None, 404, None, 400]


def test_what_cannot_be_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in", [line("a")])
    (tmp_path / "out.journal").write_text("some notes\n", encoding="utf-8")
    cases: list[tuple[list[Any], int, str]] = [
        ([source, tmp_path / "out", "--base-url", "http://127.0.0.1:1"], 1, "is no journal"),
        ([source], 2, "usage: tessera run-batch IN OUT"),
        ([tmp_path / "none", tmp_path / "new"], 1, "No such file"),
    ]
    for arguments, status, said in cases:
        assert command.main([*map(str, arguments)]) == status
        assert said in capsys.readouterr().err


def test_a_line_that_has_changed_is_answered_anew(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        run = journal.run
        journal.add(1, "a", b"one")
        journal.add(2, "b", b"two")
    with Journal(tmp_path / "journal") as journal:
        assert journal.run == run and len(journal) == 2
        assert journal.has(1, "a") and not journal.has(1, "b") and not journal.has(3, "a")
        journal.add(1, "b", b"three")
        assert (journal.result(1), journal.result(2)) == (b"three", b"two")


def error(status: int, code: str = "") -> bytes:
    body = json.dumps({"error": {"message": "no", "code": code or None}}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    ("replies", "attempts", "status"),
    [
        # An empty one closes the connection in the place of an answer.
        ([b"", error(503), error(502), error(429)] * 3, 13, 200),
        ([error(500), error(504), error(504, "first_token_timeout")], 4, 200),
        ([error(409, "model_changed"), error(504, "queue_timeout"), b""], 4, 200),
        ([error(500)] * 99, 6, 500),
        ([error(504)] * 99, 6, 504),
        ([error(504, "request_timeout")], 1, 504),
        ([error(400)], 1, 400),
        ([error(409, "idempotency_key_reused")], 1, 409),
    ],
)
async def test_what_may_go_well_next_time_is_sent_again(
    replies: list[bytes], attempts: int, status: int
) -> None:
    keys: list[bytes] = []
    answering: list[asyncio.Task[None] | None] = []
    waiting = iter([*replies, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
                keys.append(head.partition(b"idempotency-key: ")[2].split()[0])
                if not (reply := next(waiting)):
                    break
                writer.write(reply)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        soon = Backoff(0.001, 0.001)
        async with Sender(f"http://127.0.0.1:{port}/v1", "", 1, None, pauses=soon) as sender:
            reply = await sender.post("/v1/chat/completions", b"{}", "line/1")
        await asyncio.gather(*filter(None, answering))
    assert (reply.status, keys) == (status, [b"line/1"] * attempts)


@pytest.mark.full
async def test_services_of_its_own_read_permitted_pictures(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(png(1, (56, 56)))
    content = [
        {"type": "image_url", "image_url": {"url": picture.as_uri()}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    asked = line("seen", messages=[{"role": "user", "content": content}], max_tokens=4)
    asked["body"]["model"] = "mine"
    source, target = write_lines(tmp_path / "in", [asked]), tmp_path / "out"
    flags = ("--served-model-name", "mine", "--allowed-local-media-path", tmp_path)
    status, said = await ran(source, target, *flags)
    assert status == 0, said
    (result,) = results_of(target)
    assert result["response"]["status_code"] == 200, result
    assert result["response"]["body"]["model"] == "mine"
