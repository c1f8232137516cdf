"""vLLM's /tokenize, /detokenize and /tokenizer_info."""

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.model import ServedModel
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.api.openai.requests import read_conversation
from services.gateway.api.openai.schema import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
)
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.reading.bounds import text, wholes, wrong
from services.gateway.reading.data_urls import decode_media
from services.gateway.reading.decode import decode, off_loop
from services.gateway.reading.generation import check_model
from services.gateway.reading.unsupported import refuse_unsupported
from shared.mindie_shm import NAMES_FIELD
from shared.queue.token_log import decode_tokens
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest

# May be turned into text at once, whatever the model's length.
_LEAST_TOKENS = 65_536
_LONGEST_PATH = 4096

_T = TypeVar("_T")


class Tokenizing:
    """The handlers that turn text into tokens and back."""

    def __init__(self, model: ServedModel, pool: PreprocessPool, body_limits: BodyLimits) -> None:
        self._model = model
        self._pool = pool
        self._body_limits = body_limits

    async def tokenize(self, exchange: Exchange, caller: Caller) -> None:
        """POST /tokenize: `prompt`, or `messages` with the chat template."""
        prepare = await self._read(exchange, self._read_tokenize)
        prepare.request_id = caller.request_id
        prepare.tenant = tenant_of(caller, "")
        async with exchange.while_connected():
            await decode_media(prepare)
            prepared = await self._pool.prepare(prepare)
            tokens = decode_tokens(prepared.token_ids)
            if prepared.mindie_ids:
                tokens = np.frombuffer(prepared.mindie_ids, "<i8").tolist()
            limit = self._model.max_model_len
            await exchange.reply(
                TokenizeReply(count=len(tokens), max_model_len=limit, tokens=tokens)
            )

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

    def _read_tokenize(self, body: bytes) -> PrepareRequest:
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
