"""POST /api/embed, and /api/embeddings as it used to be."""

import json
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from services.gateway.admission.caller import Caller
from services.gateway.api.ollama.options import check_keep_alive, read_name, read_num_ctx
from services.gateway.api.ollama.schema import EmbedBody, EmbeddingsBody
from services.gateway.api.pooling import PooledBody, PooledPrompt, Pooling, Write
from services.gateway.decoding.decode import decode
from services.gateway.http.exchange import Exchange
from services.gateway.model.pooled_model import Task
from services.gateway.reading.generation import Prompt
from services.gateway.reading.pooling.pooled import (
    PooledFields,
    read_dimensions,
    read_inputs,
    read_pooled_prompt,
)
from shared.environment import monotonic


class NothingAsked(Exception):
    """A valid request without a text: it has the model loaded, which it always is."""


class Embeddings:
    """The handlers that give vectors."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling

    async def embed(self, exchange: Exchange, caller: Caller) -> None:
        """A vector of length 1 for each text."""
        try:
            read = partial(self._read_embed, caller=caller)
            await self._pooling.answer(exchange, caller, read)
        except NothingAsked:
            empty = {"model": self._pooling.model.name, "embeddings": []}
            await exchange.respond(200, json.dumps(empty).encode())

    async def embeddings(self, exchange: Exchange, caller: Caller) -> None:
        """The vector of one text, of whatever length it has."""
        try:
            await self._pooling.answer(exchange, caller, self._read_embeddings)
        except NothingAsked:
            await exchange.respond(200, b'{"embedding":[]}')

    def _read_embed(self, exchange: Exchange, body: bytes, caller: Caller) -> PooledBody:
        content, pooled = decode(body, EmbedBody), self._pooling.served(Task.EMBED)
        dimensions = read_dimensions(content.dimensions, pooled)
        if not content.input:
            self._check(content)
            raise NothingAsked
        prompts = read_inputs(content.input, self._pooling.model, pooled.default_prompt)
        fields = ["input"]
        if not isinstance(content.input, str):
            fields = [f"input[{index}]" for index in range(len(prompts))]

        def write(request_id: str, found: Sequence[PooledPrompt]) -> Iterator[str]:
            yield json.dumps({"model": self._pooling.model.name})[:-1] + ',"embeddings":['
            for index, one in enumerate(found):
                vector = pooled.finished(one.vector, dimensions, activates=True)
                yield ("," if index else "") + _numbers(vector.tolist())
            took = round(1e9 * (monotonic() - caller.arrived_at))
            tokens = sum(one.tokens for one in found)
            yield f'],"total_duration":{took},"load_duration":0,"prompt_eval_count":{tokens}}}'

        is_cut = content.truncate is not False
        return self._body(exchange, body, content, prompts, fields, is_cut, write)

    def _read_embeddings(self, exchange: Exchange, body: bytes) -> PooledBody:
        content, pooled = decode(body, EmbeddingsBody), self._pooling.served(Task.EMBED)
        if not content.prompt:
            self._check(content)
            raise NothingAsked
        model = self._pooling.model
        prompts = read_inputs(content.prompt, model, pooled.default_prompt, "prompt")

        def write(request_id: str, found: Sequence[PooledPrompt]) -> Iterator[str]:
            [one] = found
            vector = pooled.finished(one.vector, pooled.width, activates=False)
            yield '{"embedding":' + _numbers(vector.tolist()) + "}"

        return self._body(exchange, body, content, prompts, ["prompt"], True, write)

    def _body(
        self,
        exchange: Exchange,
        body: bytes,
        content: EmbedBody | EmbeddingsBody,
        prompts: Sequence[Prompt],
        fields: Sequence[str],
        is_cut: bool,
        write: Write,
    ) -> PooledBody:
        """`is_cut`: what exceeds the model's length, or `num_ctx`, is left out at a text's end."""
        model, pooled = self._pooling.model, self._pooling.served(Task.EMBED)
        most = min(self._check(content) or model.max_model_len, model.max_model_len - 1)
        given = PooledFields(truncate_prompt_tokens=most if is_cut else None)
        requests = [read_pooled_prompt(given, prompt, model, pooled) for prompt in prompts]
        options = self._pooling.read_options(exchange, given, body)
        return PooledBody(requests, fields, options, write)

    def _check(self, content: EmbedBody | EmbeddingsBody) -> int | None:
        """`num_ctx`; the other options are of generated tokens, and change no vector. Raises InvalidRequest or
        NotFound."""
        read_name(content.model, self._pooling.model)
        check_keep_alive(content.keep_alive)
        return read_num_ctx(content.options)


def _numbers(vector: list[float]) -> str:
    return msgspec.json.encode(vector).decode()
