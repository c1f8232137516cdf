"""How a body whose prompts become vectors is answered, whatever its API."""

import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.gateway.admission.admission import Admission
from services.gateway.admission.answer_limits import AnswerLimits
from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.generating import Generating
from services.gateway.decoding.decode import off_loop
from services.gateway.following.answer import Answer
from services.gateway.http.exchange import BodyLimits, Exchange
from services.gateway.model.pooled_model import PooledModel, Task, not_served
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.media.data_urls import DecodedBody, InlineMedia
from services.gateway.reading.pooling.pooled import PooledFields
from services.gateway.reading.valid_request import ValidRequest
from services.gateway.slices import Slices
from services.gateway.telemetry.metrics.metrics import Metrics
from shared.errors import InvalidRequest, ServingError
from shared.net import tasks
from shared.queue.keys import model_tag, new_request_id

# Each text becomes a message of its own: a small body may have so many that this takes long.
READ_TIMES = 16
_ENTRY = re.compile(r"prompt(?:\[(\d+)\])?(.*)", re.DOTALL)


class PooledPrompt(NamedTuple):
    """What became of one prompt."""

    vector: npt.NDArray[np.float32]
    tokens: int


# A reply's JSON, piece by piece, from the request's id and what became of its prompts.
Write = Callable[[str, Sequence[PooledPrompt]], Iterator[str]]


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """What a request asks for; `fields`: where it has each of the prompts, for errors about them."""

    requests: Sequence[ValidRequest]
    fields: Sequence[str]
    options: RequestOptions


@dataclass(frozen=True, slots=True)
class PooledBody(PooledPrompts):
    """What a body asks for, and how its reply is written."""

    write: Write


Reader = Callable[[Exchange, bytes], PooledBody]


class Pooling:
    """What the handlers that give vectors or scores share."""

    def __init__(
        self,
        generating: Generating,
        admission: Admission,
        metrics: Metrics,
        body_limits: BodyLimits,
        answer_limits: AnswerLimits,
        slices: Slices,
    ) -> None:
        self.model: ServedModel = generating.model
        self._generating = generating
        self._admission = admission
        self._metrics = metrics
        self._body_limits = body_limits
        self._answer_limits = answer_limits
        self._slices = slices

    def served(self, task: Task) -> PooledModel:
        """How the model does this. Raises InvalidRequest where it is not served for it."""
        self.model.require(task)
        if self.model.pooled is None:
            raise not_served(None, None)
        return self.model.pooled

    def read_options(self, exchange: Exchange, fields: PooledFields, body: bytes) -> RequestOptions:
        """What headers and body ask for beside the answer. Raises InvalidRequest naming the header or field."""
        decoded = DecodedBody(fields.options(), body, InlineMedia())
        return self._generating.read_options(exchange, decoded)

    async def answer(self, exchange: Exchange, caller: Caller, read: Reader) -> None:
        """Answers one body. Raises ServingError for what is not accepted; what was accepted ends when the client leaves
        or has its reply."""
        try:
            body = await exchange.json_body(self._body_limits)
            asked = await off_loop(partial(read, exchange), body, READ_TIMES)
            del body
            exchange.tenant = tenant_of(caller, asked.requests[0].user)
            held = self._answer_limits.take(asked.requests, self.model)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise
        try:
            async with exchange.while_connected():

                def accepted(is_last: bool) -> None:
                    exchange.accepted = True
                    if is_last:
                        exchange.release_body()

                groups = self.pool(asked, caller, accepted)
                found = [one async for some in groups for one in some]
                pieces = asked.write(caller.request_id, found)
                await exchange.respond_in_pieces(self._slices.joined(pieces))
        finally:
            self._answer_limits.give_back(held)

    async def pool(
        self, asked: PooledPrompts, caller: Caller, accepted: Callable[[bool], None]
    ) -> AsyncGenerator[Sequence[PooledPrompt], None]:
        """What becomes of the prompts, in their order. Some at a time: those of one request do not fill the queue.
        `accepted` is told whenever some are, and whether they are the last. Raises ServingError.
        """
        requests, most = asked.requests, self.model.max_prompts
        for first in range(0, len(requests), most):
            answers = await self._accept(asked, first, requests[first : first + most], caller)
            accepted(first + most >= len(requests))
            try:
                found = await tasks.together(map(_pooled, answers))
            finally:
                for answer in answers:
                    answer.close()
            yield found

    async def _accept(
        self, asked: PooledPrompts, first: int, requests: Sequence[ValidRequest], caller: Caller
    ) -> list[Answer]:
        """Each prompt is a request of its own, the first one under the exchange's id."""
        is_alone = len(asked.requests) == 1
        tag, options = model_tag(self.model.name), asked.options
        callers = [caller if first == 0 else replace(caller, request_id=new_request_id(tag))]
        callers += [replace(caller, request_id=new_request_id(tag)) for _ in requests[1:]]
        if first and options.idempotency_key:
            options = replace(options, idempotency_key=f"{options.idempotency_key}\0{first}")
        try:
            if is_alone:
                return [await self._admission.accept(requests[0], caller, options)]
            return await self._admission.accept_all(requests, callers, options)
        except InvalidRequest as error:
            raise _about(error, asked.fields[first:]) from None


async def _pooled(answer: Answer) -> PooledPrompt:
    return PooledPrompt(await answer.vector(), answer.prompt_tokens)


def _about(error: InvalidRequest, fields: Sequence[str]) -> InvalidRequest:
    """An error about `prompt`, or `prompt[i]` of several, as the body calls it."""

    def named(text: str) -> str:
        found = _ENTRY.fullmatch(text)
        if found is None:
            return text
        return f"{fields[int(found[1] or 0)]}{found[2]}"

    metadata = dict(error.metadata)
    if "field" in metadata:
        metadata["field"] = named(metadata["field"])
    return type(error)(error.reason, named(error.message), **metadata)
