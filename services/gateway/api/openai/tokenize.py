"""vLLM's /tokenize, /detokenize and /tokenizer_info."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.model import ServedModel
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.admission.prompt_stream import is_short
from services.gateway.api.openai.requests import read_conversation
from services.gateway.api.openai.schema import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeRequest,
)
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.reading.bounds import text, wholes, wrong
from services.gateway.reading.data_urls import serialized
from services.gateway.reading.decode import decode, off_loop
from services.gateway.reading.generation import check_model
from services.gateway.reading.unsupported import refuse_unsupported
from services.gateway.slices import Slices
from shared.mindie_shm import NAMES_FIELD
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest

# May be turned into text at once, whatever the model's length.
_LEAST_TOKENS = 65_536
_LONGEST_PATH = 4096
_SLICE_TOKENS = 8192

_T = TypeVar("_T")


class Tokenizing:
    """The handlers that turn text into tokens and back."""

    def __init__(
        self, model: ServedModel, pool: PreprocessPool, body_limits: BodyLimits, slices: Slices
    ) -> None:
        self._slices = slices
        self._model = model
        self._pool = pool
        self._body_limits = body_limits

    async def tokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /tokenize: `prompt`, or `messages` with the chat template."""
        prepare, is_one_of_many = await self._read(exchange, self._read_tokenize)
        prepare.request_id = caller.request_id
        prepare.tenant = tenant_of(caller, "")
        async with exchange.while_connected():
            prompt = prepare if is_one_of_many else await serialized(prepare)
            prepared = await self._pool.prepare(prompt)
            ids = np.frombuffer(prepared.token_ids, "<i4")
            if prepared.mindie_ids:
                ids = np.frombuffer(prepared.mindie_ids, "<i8")
            pieces = _reply(ids, self._model.max_model_len)
            await exchange.respond_in_pieces(self._slices.joined(pieces))

    async def detokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /detokenize: `tokens` to `prompt`."""
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

    def _read_tokenize(self, body: bytes) -> tuple[PrepareRequest, bool]:
        prepare = self._prompt_of(body)
        return prepare, is_short(prepare)

    def _prompt_of(self, body: bytes) -> PrepareRequest:
        content = decode(body, TokenizeRequest)
        check_model(content.model, self._model)
        names = text(NAMES_FIELD, content.shm_name_save_path, _LONGEST_PATH)
        if content.messages is not None:
            refuse_unsupported(content)
            prepare = read_conversation(content)
            prepare.shm_name_save_path = names
            return prepare
        if content.prompt is None:
            raise wrong("prompt", "is missing")
        return PrepareRequest(text=content.prompt, shm_name_save_path=names)

    def _read_detokenize(self, body: bytes) -> list[int]:
        content = decode(body, DetokenizeRequest)
        check_model(content.model, self._model)
        if content.tokens is None:
            raise wrong("tokens", "is missing")
        most = max(self._model.max_model_len, _LEAST_TOKENS)
        return list(wholes("tokens", content.tokens, 0, self._model.vocab_size - 1, most))


def _reply(ids: npt.NDArray[np.integer[Any]], max_model_len: int) -> Iterator[str]:
    """A `TokenizeReply` as JSON, piece by piece."""
    yield f'{{"count":{len(ids)},"max_model_len":{max_model_len},"tokens":['
    for start in range(0, len(ids), _SLICE_TOKENS):
        some = ids[start : start + _SLICE_TOKENS].tolist()
        yield ("," if start else "") + ",".join(map(str, some))
    yield "]}"
