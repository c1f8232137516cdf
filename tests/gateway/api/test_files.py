"""/v1/files as OpenAI's client sees it, and forms that are none."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import DefaultHttpxClient, OpenAI
from tokenizers import Tokenizer

from services.gateway.apis import APIS
from shared.queue import connect
from shared.queue.keys import Keys
from tests.support.gateway.stage import MODEL, Stage, open_stage

OURS = {"authorization": "Bearer none"}  # the tenant of the client
BOUNDARY = "next"
FORM = OURS | {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
MOST = 3 << 20


@pytest.fixture
async def stage(redis_url: str, model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Stage]:
    small = {"max_file_bytes": MOST, "file_store_bytes": 7 << 20}
    async with open_stage(redis_url, model_folder, tokenizer, APIS, **small) as opened:
        yield opened


def part(name: str, content: bytes, more: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


FILE = part("file", b"{}\n", '; filename="a.jsonl"')
BATCH = part("purpose", b"batch")


async def stored_bytes(stage: Stage) -> int:
    async with connect(stage.settings.redis_url) as redis:
        return int(await redis.get(f"{Keys(MODEL).prefix}:stored:total") or 0)


async def test_a_file_comes_back_as_it_was_sent(stage: Stage) -> None:
    # Beginnings of a boundary, at the ends of pieces too.
    content = (b"\r\n--" * 1000 + bytes(range(256)) * 4096)[: 1 << 20] + b"\r" * 70_001 + b"\n--x"

    def use() -> None:
        with OpenAI(
            base_url=f"{stage.gateway.url}/v1",
            api_key="none",
            http_client=DefaultHttpxClient(verify=False),
        ) as client:
            after: Any = {"anchor": "created_at", "seconds": 3600}
            name = "ein Blatt „ü“.jsonl"
            file = client.files.create(
                file=(name, io.BytesIO(content)), purpose="batch", expires_after=after
            )
            assert (file.bytes, file.filename, file.purpose) == (len(content), name, "batch")
            assert (file.object, file.status) == ("file", "processed")
            assert file.expires_at == file.created_at + 3600
            assert client.files.retrieve(file.id) == file
            assert client.files.content(file.id).read() == content
            assert [one.id for one in client.files.list()] == [file.id]
            assert client.files.delete(file.id).deleted
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                client.files.content(file.id)

    await asyncio.to_thread(use)
    assert await stored_bytes(stage) == 0


async def test_what_is_too_large_is_refused_with_the_limit(stage: Stage) -> None:
    for size in (MOST + 1, MOST + (2 << 20)):
        with pytest.raises(openai.APIStatusError, match=str(MOST)) as caught:
            await stage.openai.files.create(file=b"x" * size, purpose="batch")
        assert caught.value.status_code == 413
    for _ in range(2):
        await stage.openai.files.create(file=b"x" * MOST, purpose="batch")
    with pytest.raises(openai.RateLimitError, match="--file-store-bytes"):
        await stage.openai.files.create(file=b"x" * MOST, purpose="batch")
    async with asyncio.timeout(60):
        while await stored_bytes(stage) != 2 * MOST:
            await asyncio.sleep(0.01)
    page = await stage.http.get("/metrics")
    (size,) = re.findall(r"^tessera_stored_file_bytes (\S+)", page.text, re.MULTILINE)
    assert float(size) == 2 * MOST


async def test_a_client_that_leaves_leaves_nothing(stage: Stage) -> None:
    host, port = stage.gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: 3000000\r\n"
    sent = part("file", b"x" * (2 << 20), '; filename="a"')
    writer.write(f"{head}Content-Type: {FORM['content-type']}\r\n\r\n".encode() + sent)
    await writer.drain()
    async with asyncio.timeout(60):
        while not await stored_bytes(stage):
            await asyncio.sleep(0.01)
        writer.close()
        while await stored_bytes(stage):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(BATCH), "file"),
        (form(BATCH, part("file", b"", '; filename="a"')), "file"),
        (form(BATCH, FILE, FILE), "file"),
        (form(FILE), "purpose"),
        (form(part("purpose", b"assistants"), FILE), "purpose"),
        (form(BATCH, FILE, part("expires_after[anchor]", b"created_at")), "expires_after[seconds]"),
        (
            form(BATCH, FILE, part("expires_after[seconds]", b"7200")),
            "expires_after[anchor]",
        ),
        (form(part("purpose", b"b" * 2000), FILE), "purpose"),
        (form(*[part(f"f{number}", b"") for number in range(17)], BATCH, FILE), None),
        (form(BATCH, FILE)[:-10], None),
        (b"no form", None),
        (b"", None),
        (b"--next\r\n" + b"X: y\r\n" * 50 + b"\r\n", None),
        (b"--next\r\n" + b"x" * 9000, None),
    ],
)
async def test_a_form_that_is_none_is_said_to_be_none(
    stage: Stage, body: bytes, param: str | None
) -> None:
    reply = await stage.http.post("/v1/files", content=body, headers=FORM)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert (await stage.openai.files.list()).data == []


async def test_other_media_types_are_refused(stage: Stage) -> None:
    for kind in (
        "application/json",
        "multipart/form-data",
        "",
        "multipart/form-data; boundary=" + "b" * 300,
    ):
        headers = OURS | {"content-type": kind}
        reply = await stage.http.post("/v1/files", content=form(BATCH, FILE), headers=headers)
        assert reply.status_code in (400, 415), kind
    reply = await stage.http.post("/v1/files", content=form(FILE, BATCH), headers=FORM)
    assert reply.status_code == 200, "fields may come behind the file"
