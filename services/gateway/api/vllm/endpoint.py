"""vLLM's POST /generate, and its routes for LoRA adapters."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from json.encoder import encode_basestring
from typing import Any

import msgspec

from services.gateway.admission.api_keys import BEARER
from services.gateway.admission.caller import Caller
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.error_object import error_body, error_reply
from services.gateway.api.generating import Generating
from services.gateway.api.parts import Api, Parts
from services.gateway.api.vllm.adapters import Adapters
from services.gateway.api.vllm.schema import (
    GenerateReply,
    GenerateRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from services.gateway.decoding.bounds import wrong
from services.gateway.following.answer import Answer, Outcome, Piece
from services.gateway.following.event_id import FINISH_SENT, OPEN, EventIds
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from services.gateway.http.streams import write_stream
from services.gateway.reading.calls.tools import refuse_tools
from services.gateway.reading.fields.unsupported import unsupported
from services.gateway.reading.generation import read_generation
from services.gateway.reading.media.data_urls import DecodedBody, decode_with_media
from services.gateway.reading.prompt_parts import media_urls, read_prompt
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import ServingError
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_DEFAULT_TOKENS = 16
# Bytes that the prompt may take in each line of a stream.
_MOST_REPEATED = 1 << 20
# What the reply has no place for.
_NOT_SHOWN = (
    "stream_options", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids",
)  # fmt: skip


class LineWriter:
    """An answer as lines of JSON: each has the prompt and all that is known of every choice."""

    media_type = b"application/x-ndjson"
    ping = after_ping = b""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        """`with_ids`: lines say where they are, as `event_id`."""
        self._answer = answer
        self._ids = EventIds(answer.head.request_id, answer.progress) if with_ids else None
        self._prompt = answer.head.reply.prompt_text
        # None until something of the choice has come: what a client has of it is folded when its tokens are known.
        self._texts: list[str | None] = [None] * answer.head.sampling.n

    def accepted(self) -> bytes:
        """Nothing."""
        return b""

    def first(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def piece(self, piece: Piece) -> bytes:
        """A line, where the piece has text or ends the choice."""
        if self._ids is not None:
            end = OPEN if piece.ending is None else FINISH_SENT
            self._ids.go_on(piece.choice, piece.count, end)
        if not piece.text and piece.ending is None:
            return b""
        before = self._text(piece.choice)
        self._texts[piece.choice] = before + piece.text
        content: dict[str, Any] = {
            "text": [self._prompt + self._text(choice) for choice in range(len(self._texts))]
        }
        if self._ids is not None:
            content["event_id"] = self._ids.current()
        return f"{json.dumps(content, ensure_ascii=False)}\n".encode()

    def end(self) -> bytes:
        """Nothing."""
        return b""

    def failure(self, error: ServingError) -> bytes:
        """A line with the error."""
        return error_body(error) + b"\n"

    def _text(self, choice: int) -> str:
        text = self._texts[choice]
        if text is not None:
            return text
        progress = self._answer.progress
        count, is_whole = progress.counts[choice], progress.ends[choice] == FINISH_SENT
        text = self._answer.text(choice, None if is_whole else count)
        if len(self._answer.token_ids(choice)) >= count:
            self._texts[choice] = text
        return text


class VllmEndpoint:
    """POST /generate, of a body with `prompt`, and adapters that are loaded while the system runs."""

    roots = ()
    key_headers = (BEARER,)

    def __init__(self, generating: Generating, adapters: Adapters) -> None:
        self._generating = generating
        self.routes: Sequence[Route] = (
            Route(
                "POST", "/generate", self._generate, GenerateRequest, GenerateReply,
                generates=True, known_by="prompt",
            ),
            Route("POST", "/v1/load_lora_adapter", adapters.load, LoadAdapterRequest),
            Route("POST", "/v1/unload_lora_adapter", adapters.unload, UnloadAdapterRequest),
        )  # fmt: skip

    def error(self, error: ServingError) -> ErrorReply:
        """In OpenAI's form, as vLLM has it."""
        return error_reply(error)

    async def _generate(self, exchange: Exchange, caller: Caller) -> None:
        await self._generating.answer(exchange, caller, self._read, _write)

    def _read(self, exchange: Exchange, body: bytes) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = decode_with_media(body, GenerateRequest, lambda found: media_urls(found.prompt))
        content, model = decoded.content, self._generating.model
        refuse_tools(content)
        for name in _NOT_SHOWN:
            if getattr(content, name) not in (None, False):
                raise unsupported(name, "has no place in this reply: /v1/completions shows it")
        prompt = read_prompt(content.prompt, "prompt", model)
        options = msgspec.structs.replace(content, echo=None)
        if options.max_tokens is None and options.max_completion_tokens is None:
            options = msgspec.structs.replace(options, max_tokens=_DEFAULT_TOKENS)
        request = read_generation(options, prompt, ReplyKind.REPLY_KIND_VLLM, None, model)
        request.reply.prompt_text = prompt.text()
        if request.stream:
            _check_lines(request)
        found = DecodedBody(options, decoded.json, decoded.media)
        request = replace(request, inline_media=decoded.media)
        return [request], self._generating.read_options(exchange, found)


def _check_lines(request: ValidRequest) -> None:
    """Raises InvalidRequest where each line would repeat too much."""
    repeated = request.sampling.n * len(request.reply.prompt_text.encode())
    if repeated > _MOST_REPEATED:
        raise wrong(
            "prompt",
            f"is repeated for each of n choices in every line of a stream, {repeated} bytes of at most"
            f" {_MOST_REPEATED}: shorten prompt, lower n, or set stream to false",
        )


async def _write(
    exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
) -> None:
    [answer] = answers
    if stream:
        await write_stream(exchange, answers, [LineWriter(answer, with_ids)])
        return
    written = _whole(answer.head.reply.prompt_text, await answer.whole())
    await exchange.respond_in_pieces(answer.slices.joined(written))


def _whole(prompt: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A `GenerateReply` as JSON, piece by piece."""
    begin = encode_basestring(prompt)[:-1]
    yield '{"text":['
    for index, outcome in enumerate(outcomes):
        yield f"{',' if index else ''}{begin}"
        yield encode_basestring(outcome.text)[1:]
    yield "]}"


def _endpoint(parts: Parts) -> VllmEndpoint:
    return VllmEndpoint(parts.generating, Adapters(parts.adapters, parts.body_limits))


VLLM = Api(_endpoint, {ReplyKind.REPLY_KIND_VLLM: ReplyForm(LineWriter)})
