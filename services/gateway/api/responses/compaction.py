"""POST /v1/responses/compact: a conversation becomes the messages of its user, and a summary of all else."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.compact_json import compact
from services.gateway.api.generating import Generating
from services.gateway.api.part_list import PartKind, parts_of
from services.gateway.api.responses.compaction_items import TYPE, closed
from services.gateway.api.responses.creation import conversation_items
from services.gateway.api.responses.input_items import listed_item
from services.gateway.api.responses.kept import KeptResponses
from services.gateway.api.responses.references import merge_resolved, refers, resolved
from services.gateway.api.responses.requests import media_urls, read_response
from services.gateway.api.responses.response import ID_PREFIX, usage_object
from services.gateway.api.responses.schema import (
    CompactBody,
    Item,
    KeptFields,
    Reasoning,
    ResponseBody,
)
from services.gateway.decoding.decode import decode, off_loop
from services.gateway.decoding.typed import decoder_of
from services.gateway.following.answer import Answer
from services.gateway.http.exchange import Exchange
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.media.data_urls import DecodedBody, decode_with_media
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import Internal
from tessera.common.v1.ending_pb2 import FinishReason

_STOP = FinishReason.FINISH_REASON_STOP
# Who says what is never left out of a conversation.
_KEPT_ROLES = ("user", "system", "developer")
# Tokens of a summary: a share of what fits into the model, and no more than this.
_SHARE, _MOST_TOKENS = 4, 2048
_ASK = (
    "The conversation until here is about to be replaced by a summary. Write it. Whoever goes on has all messages of"
    " the user's, and nothing else but your summary: say what was answered, done, found out and decided, with the"
    " names, numbers, paths and results that are still needed, and what is left to do. Do not repeat the user's"
    " messages, and do not go on with the conversation. Answer with the summary alone."
)


class Compaction:
    """One request for it."""

    def __init__(self, generating: Generating, kept: KeptResponses, caller: Caller) -> None:
        self._generating = generating
        self._kept = kept
        self._caller = caller
        self._earlier: Sequence[Item] = ()
        # The input with items in the places of their names, where it has some.
        self._resolved = b""
        # Messages that stay, as JSON.
        self._staying: list[bytes] = []

    async def look_up(self, body: bytes) -> None:
        """Finds the conversation, and what of it stays. Raises InvalidRequest."""
        fields = await off_loop(partial(decode, kind=KeptFields), body)
        tenant = tenant_of(self._caller, fields.user or "")
        given = bytes(fields.input)
        if self._kept.is_on and refers(body):
            given = self._resolved = await resolved(given, self._kept, tenant)
        chain: Sequence[tuple[bytes, bytes]] = ()
        if fields.previous_response_id:
            chain = await self._kept.earlier(fields.previous_response_id, tenant)
        size = sum(len(asked) + len(response) for asked, response in chain)
        await off_loop(partial(self._read_conversation, chain), given, 1 + size // (len(given) + 1))

    def read(self, exchange: Exchange, body: bytes) -> tuple[list[ValidRequest], RequestOptions]:
        """The request for a summary. Raises InvalidRequest naming the field, or NotFound."""
        decoded = decode_with_media(body, CompactBody, media_urls)
        if self._resolved and isinstance(decoded.content.input, list):
            merge_resolved(decoded.content.input, self._resolved)
        model = self._generating.model
        asked = _response_body(decoded.content, model)
        request, options = read_response(asked, model, self._earlier, ask=_ASK)
        self._earlier = ()
        request = replace(request, inline_media=decoded.media, lowers_max_tokens=True)
        read = DecodedBody(options, decoded.json, decoded.media)
        return [request], self._generating.read_options(exchange, read)

    async def write(
        self, exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
    ) -> None:
        """The messages that stay, and the summary. Raises Internal where the model wrote none."""
        [answer] = answers
        [outcome] = await answer.whole()
        parts = parts_of(outcome, ended_itself=outcome.ending.reason == _STOP)
        summary = "".join(part.text for part in parts if part.kind is PartKind.TEXT).strip()
        if not summary:
            raise Internal(
                "NO_SUMMARY", "the model wrote no summary of the conversation: try again"
            )
        usage = usage_object(answer, outcome.tokens, answer.reasoning_tokens)
        pieces = _written(answer.head.request_id, self._staying, summary)
        head = {
            "id": ID_PREFIX + answer.head.request_id,
            "object": "response.compaction",
            "created_at": answer.head.created_unix_s,
            "usage": usage,
        }
        whole = _whole(head, pieces)
        await exchange.respond_in_pieces(answer.slices.joined(whole))

    def _read_conversation(self, chain: Sequence[tuple[bytes, bytes]], given: bytes) -> None:
        self._earlier = conversation_items(chain)
        for asked, _ in chain:  # responses have no messages of the user's
            self._staying += _messages(asked)
        self._staying += _messages(given)


class _Said(msgspec.Struct):
    """What is read of an item to learn whether it stays."""

    type: Any = None
    role: Any = None


def _messages(given: bytes) -> Iterator[bytes]:
    """The messages of an input that stay, as JSON; none of an input that is wrong: its reader says why."""
    try:
        content = decoder_of(str | list[msgspec.Raw] | None).decode(given or b"null")
        if isinstance(content, str):
            yield msgspec.json.encode({"role": "user", "content": content})
            return
        for item in content or ():
            said = decoder_of(_Said).decode(item)
            if said.type in (None, "message") and said.role in _KEPT_ROLES:
                yield bytes(item)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return


def _response_body(body: CompactBody, model: ServedModel) -> ResponseBody:
    """A request for a response with the same fields. Thoughts would take the place of the summary."""
    most = max(1, min(_MOST_TOKENS, model.max_model_len // _SHARE))
    return ResponseBody(
        model=body.model,
        input=body.input,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        reasoning=Reasoning(effort="none"),
        max_output_tokens=most if body.max_output_tokens is None else body.max_output_tokens,
        store=False,
        user=body.user,
        service_tier=body.service_tier,
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_retention=body.prompt_cache_retention,
        priority=body.priority,
        timeout=body.timeout,
        cache_salt=body.cache_salt,
    )


def _written(request_id: str, staying: Sequence[bytes], summary: str) -> Iterator[str]:
    """The items, one by one."""
    for index, item in enumerate(staying):
        yield compact(listed_item(f"in_{request_id}_{index}", json.loads(item)))
    yield compact({"id": f"cmp_{request_id}", "type": TYPE, "encrypted_content": closed(summary)})


def _whole(head: Mapping[str, Any], items: Iterator[str]) -> Iterator[str]:
    yield compact(head)[:-1] + ',"output":['
    for index, item in enumerate(items):
        yield f"{',' if index else ''}{item}"
    yield "]}"
