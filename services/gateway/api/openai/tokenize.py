"""vLLM's /tokenize, /detokenize and /tokenizer_info."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.admission.sent_files import SentFiles
from services.gateway.api.openai.requests import read_conversation
from services.gateway.api.openai.schema import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeRequest,
)
from services.gateway.api.token_lists import listed
from services.gateway.decoding.bounds import text, wholes, wrong
from services.gateway.decoding.decode import decode, off_loop
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.calls.tools import read_tools, refuse_tools
from services.gateway.reading.fields.unsupported import is_off, refuse_unsupported
from services.gateway.reading.generation import check_model, read_window
from services.gateway.reading.media.media_options import read_media_options
from services.gateway.reading.short_prompts import is_short
from services.gateway.slices import Slices
from shared.artifacts.mindie_shm import NAMES_FIELD
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest

# May be turned into text at once, whatever the model's length.
_LEAST_TOKENS = 65_536
_LONGEST_PATH = 4096

_T = TypeVar("_T")


class _Asked(NamedTuple):
    """What /tokenize is to do."""

    prepare: PrepareRequest
    is_short: bool
    with_texts: bool  # of the tokens


class Tokenizing:
    """The handlers that turn text into tokens and back."""

    def __init__(
        self,
        model: ServedModel,
        pool: PreprocessPool,
        sent_files: SentFiles,
        body_limits: BodyLimits,
        slices: Slices,
    ) -> None:
        self._slices = slices
        self._model = model
        self._pool = pool
        self._sent_files = sent_files
        self._body_limits = body_limits

    async def tokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /tokenize: the tokens of `prompt`, or of `messages` with the chat template."""
        asked = await self._read(exchange, self._read_tokenize)
        prepare = asked.prepare
        prepare.request_id = caller.request_id
        prepare.tenant = tenant_of(caller, "")
        async with exchange.while_connected():
            if asked.is_short:
                prepared = await self._pool.prepare(prepare)
            else:
                async with self._sent_files.serialized(prepare, caller) as prompt:
                    prepared = await self._pool.prepare(prompt)
            ids = np.frombuffer(prepared.token_ids, "<i4")
            if prepared.mindie_ids:
                ids = np.frombuffer(prepared.mindie_ids, "<i8")
            pieces = _reply(ids, self._model, asked.with_texts)
            await exchange.respond_in_pieces(self._slices.joined(pieces))

    async def detokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /detokenize: the text of `tokens`."""
        tokens = await self._read(exchange, self._read_detokenize)
        text = await asyncio.to_thread(self._model.table.text, tokens, skip_special_tokens=False)
        await exchange.reply(DetokenizeReply(prompt=text))

    async def tokenizer_info(self, exchange: Exchange, caller: Caller) -> None:
        """GET /tokenizer_info: the checkpoint's tokenizer_config.json, with the chat template."""
        info = dict(self._model.tokenizer_info)
        await exchange.respond(200, json.dumps(info, ensure_ascii=False).encode())

    async def _read(self, exchange: Exchange, read: Callable[[bytes], _T]) -> _T:
        body = await exchange.json_body(self._body_limits)
        found = await off_loop(read, body)
        exchange.release_body()
        return found

    def _read_tokenize(self, body: bytes) -> _Asked:
        content = decode(body, TokenizeRequest)
        check_model(content.model, self._model)
        refuse_unsupported(content)
        prepare = _read_prompt(content, self._model)
        read_media_options(content, prepare)
        prepare.shm_name_save_path = text(NAMES_FIELD, content.shm_name_save_path, _LONGEST_PATH)
        if content.add_special_tokens is not None:
            prepare.add_special_tokens = content.add_special_tokens
        if (window := read_window(content.max_window_size)) is not None:
            prepare.max_window_size = window
        return _Asked(prepare, is_short(prepare), content.return_token_strs is True)

    def _read_detokenize(self, body: bytes) -> list[int]:
        content = decode(body, DetokenizeRequest)
        check_model(content.model, self._model)
        if content.tokens is None:
            raise wrong("tokens", "is missing")
        most = max(self._model.max_model_len, _LEAST_TOKENS)
        return list(wholes("tokens", content.tokens, 0, self._model.vocab_size - 1, most))


def _reply(
    ids: npt.NDArray[np.integer[Any]], model: ServedModel, with_texts: bool
) -> Iterator[str]:
    """A `TokenizeReply` as JSON, piece by piece."""
    yield f'{{"count":{len(ids)},"max_model_len":{model.max_model_len},"tokens":['
    yield from listed(ids, str)
    if with_texts:
        yield '],"token_strs":['
        yield from listed(ids, lambda token: json.dumps(_spelled(model, token)))
    yield "]}"


def _spelled(model: ServedModel, token: int) -> str | None:
    """The token as the vocabulary spells it; None for an id without one, as MindIE's of pictures are."""
    return model.tokenizer.id_to_token(token) if token >= 0 else None


def _read_prompt(content: TokenizeRequest, model: ServedModel) -> PrepareRequest:
    if content.messages is not None:
        if content.prompt is not None:
            raise wrong("prompt", "cannot be combined with messages: leave one of them out")
        tools = read_tools(content, model.forms, may_call=False, takes_custom=True)
        return read_conversation(content, tools)
    if content.prompt is None:
        raise wrong(
            "prompt", "is missing: send a text as `prompt`, or a conversation as `messages`"
        )
    refuse_tools(content)
    if not is_off(content.chat_template_kwargs, {}):
        raise wrong("chat_template_kwargs", "is for messages: leave it out")
    return PrepareRequest(text=content.prompt)
