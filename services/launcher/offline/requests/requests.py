"""Requests of one event loop to the services: each a stream that goes on after the death of any of them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.launcher.offline.errors import EngineFailed, raised
from services.launcher.offline.outputs import RequestOutput
from services.launcher.offline.prompts.prompts import CHAT, Prompt
from services.launcher.offline.requests.answer import AnswerFold
from services.launcher.offline.requests.path_adapters import PathAdapters
from services.launcher.offline.requests.token_texts import TokenTexts
from services.launcher.offline.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from shared.client import Client, ClientError
from shared.net import tasks

# Requests at once; the others wait here.
_AT_ONCE = 256
# How long a service may need to be back; a decoder reads its weights anew.
_PATIENCE_S = 600.0
_LOOK_S = 2.0  # whether the services have ended for good


class Requests:
    """Sends requests. `failure` says why the services have ended for good, empty as long as they have not."""

    def __init__(
        self,
        url: str,
        key: str,
        failure: Callable[[], str],
        token_texts: TokenTexts,
        modules: Mapping[str, Path],
        *,
        loads_adapters: bool,
    ) -> None:
        """modules: folders of adapters that the services have from their start; loads_adapters: whether they may load
        others."""
        self._token_texts = token_texts
        self._client = Client([url], api_key=key, patience_s=_PATIENCE_S)
        self._adapters = PathAdapters(self._client, modules, by_path=loads_adapters)
        self._failure = failure
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def stream(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        aborted: "asyncio.Future[None] | None" = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs that have all that has come so far; the last one is `finished`. Leaving it before cancels the
        request; where `aborted` is set it ends at once. `params`: None takes the model's own defaults.

        Raises RequestRefused, EngineFailed.
        """
        fold = await self._fold(request_id, prompt, params)
        async with self._places:
            try:
                named = await self._named(prompt)
                async with contextlib.aclosing(self._events(named, params, aborted)) as events:
                    async for event in events:
                        if fold.add(event) and not fold.has_ended:
                            yield fold.output(finished=False)
            except ClientError as error:
                raise raised(error) from None
        fold.abort()
        yield fold.output(finished=True)

    async def whole(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None
    ) -> RequestOutput:
        """The finished output alone. Raises RequestRefused, EngineFailed."""
        fold = await self._fold(request_id, prompt, params)
        async with self._places:
            try:
                named = await self._named(prompt)
                async with contextlib.aclosing(self._events(named, params, None)) as events:
                    async for event in events:
                        fold.add(event)
            except ClientError as error:
                raise raised(error) from None
        return fold.output(finished=True)

    async def reply(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The whole reply to a body. Raises RequestRefused, EngineFailed."""
        async with self._places:
            try:
                events = self._watched(_one(self._client.whole(path, body)), None)
                (reply,) = [event async for event in events]
                return reply
            except ClientError as error:
                raise raised(error) from None

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    async def _named(self, prompt: Prompt) -> Prompt:
        """The same, with the name of its adapter in its fields. Raises ValueError, ClientError."""
        if prompt.adapter is None:
            return prompt
        name = await self._adapters.name_of(prompt.adapter)
        return replace(prompt, body={**prompt.body, "model": name})

    async def _fold(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None
    ) -> AnswerFold:
        choices, top = (1, None) if params is None else (params.n, params.logprobs)
        if top is not None and prompt.path != CHAT:
            await asyncio.to_thread(self._token_texts.load)
        return AnswerFold(request_id, prompt.text, choices, top or 0, self._token_texts.text)

    async def _sent(
        self, prompt: Prompt, params: SamplingParams | None
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """The data of the answer's events; one alone where the best of several are chosen at the end."""
        body = _body(prompt, params)
        if params is not None and params.is_chosen_at_end:
            yield await self._client.whole(prompt.path, body)
            return
        streamed = {**body, "stream_options": {"include_usage": True}}
        async with contextlib.aclosing(self._client.stream(prompt.path, streamed)) as events:
            async for event in events:
                yield event.data

    async def _events(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        aborted: "asyncio.Future[None] | None",
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """The same, until `aborted` is set. Raises EngineFailed where the services have ended."""
        async with contextlib.aclosing(
            self._watched(self._sent(prompt, params), aborted)
        ) as events:
            async for event in events:
                yield event

    async def _watched(
        self,
        sent: AsyncGenerator[Mapping[str, Any], None],
        aborted: "asyncio.Future[None] | None",
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        stop: list[asyncio.Future[Any]] = [] if aborted is None else [aborted]
        async with contextlib.aclosing(sent) as events:
            while True:
                coming = asyncio.create_task(_next(events))
                try:
                    while not coming.done():
                        await asyncio.wait(
                            [coming, *stop], timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                        )
                        if aborted is not None and aborted.done():
                            return
                        if not coming.done() and (failure := self._failure()):
                            raise EngineFailed(failure)
                finally:
                    await tasks.end(coming)
                if (event := coming.result()) is None:
                    return
                yield event


async def _one(coming: Awaitable[Mapping[str, Any]]) -> AsyncGenerator[Mapping[str, Any], None]:
    yield await coming


async def _next(
    events: AsyncGenerator[Mapping[str, Any], None],
) -> Mapping[str, Any] | None:
    return await anext(events, None)


def _body(prompt: Prompt, params: SamplingParams | None) -> dict[str, Any]:
    is_chat = prompt.text is None and "messages" in prompt.body
    given = {"max_tokens": DEFAULT_MAX_TOKENS} if params is None else params.fields(is_chat=is_chat)
    return {
        **given,
        **prompt.body,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
