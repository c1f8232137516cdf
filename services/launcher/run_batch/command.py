"""`tessera run-batch IN OUT`: every request of a file is answered, by a server that runs or by services of its own."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from services.launcher.run_batch.journal import Journal, JournalError
from services.launcher.run_batch.lines import Line, answered, lines_of, read_line, unanswered
from services.launcher.run_batch.own_server import NotServed, own_server
from services.launcher.run_batch.sending import Sender, ServerAway
from services.launcher.settings import RunBatchSettings
from shared.errors import ServingError
from shared.net import tasks

_PROG = "tessera run-batch"
_USAGE = f"usage: {_PROG} IN OUT [--base-url URL | MODEL and options of `tessera serve`]"
_AT_ONCE = 64
_BASE_URL = "--base-url"


def main(arguments: list[str]) -> int:
    """Returns 0 when OUT is whole, 1 where the run was interrupted: the same command goes on with it."""
    files, rest = arguments[:2], arguments[2:]
    if len(files) < 2 or any(name.startswith("-") for name in files):
        print(_USAGE, file=sys.stderr)
        return 2
    source, target = Path(files[0]), Path(files[1])
    try:
        return asyncio.run(_run(source, target, rest))
    except (JournalError, NotServed, ServerAway, ServingError, ValueError, OSError) as error:
        said = error.message if isinstance(error, ServingError) else error
        print(f"{_PROG}: {said}", file=sys.stderr)
        return 1


async def _run(source: Path, target: Path, rest: Sequence[str]) -> int:
    journal_path = target.with_name(f"{target.name}.journal")
    lines = sum(1 for _ in lines_of(source))
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(journal_path))
        if len(journal):
            print(f"{_PROG}: goes on behind {len(journal)} of {lines} lines", file=sys.stderr)
        if any(not journal.has(line.number, line.digest) for line in lines_of(source)):
            sender = await _sender(stack, source, target, rest)
            await _answer_all(source, journal, sender)
        failed = _write(source, target, journal)
        journal.remove()
    print(f"{_PROG}: {target}: {lines - failed} of {lines} lines answered", file=sys.stderr)
    return 0


async def _sender(stack: AsyncExitStack, source: Path, target: Path, rest: Sequence[str]) -> Sender:
    if any(word.partition("=")[0] == _BASE_URL for word in rest):
        settings = RunBatchSettings.load([str(source), str(target), *rest], prog=_PROG)
        sender = Sender(settings.base_url, settings.key, _AT_ONCE, settings.tls())
    else:
        url, key = await stack.enter_async_context(own_server(rest))
        sender = Sender(url, key, _AT_ONCE, None)
    return await stack.enter_async_context(sender)


async def _answer_all(source: Path, journal: Journal, sender: Sender) -> None:
    places = asyncio.Semaphore(_AT_ONCE)
    running: set[asyncio.Task[None]] = set()
    try:
        for line in lines_of(source):
            if journal.has(line.number, line.digest):
                continue
            await places.acquire()
            task = asyncio.create_task(_answer(line, journal, sender))
            task.add_done_callback(lambda _: places.release())
            running.add(task)
            for done in [one for one in running if one.done()]:
                running.remove(done)
                done.result()
        await asyncio.gather(*running)
    finally:
        await tasks.end(*running)


async def _answer(line: Line, journal: Journal, sender: Sender) -> None:
    asked = read_line(line.text)
    if asked.problem:
        journal.add(line.number, line.digest, unanswered(journal.run, line, asked))
        return
    key = f"run-batch/{journal.run}/{line.number}/{line.digest}"
    reply = await sender.post(asked.url, asked.body, key)
    result = answered(
        journal.run, line, asked.custom_id, reply.status, reply.request_id, reply.body
    )
    journal.add(line.number, line.digest, result)


def _write(source: Path, target: Path, journal: Journal) -> int:
    """Writes all results in the order of their lines. Returns how many have no answer of status 200."""
    failed = 0
    part = target.with_name(f"{target.name}.part")
    with part.open("wb") as file:
        for line in lines_of(source):
            result = journal.result(line.number)
            response = json.loads(result)["response"]
            failed += response is None or response["status_code"] != 200
            file.write(result + b"\n")
    os.replace(part, target)
    return failed
