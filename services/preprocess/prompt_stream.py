"""Short prompts, several at a time: each message of a stream is one piece of work for a thread."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor

import structlog

from services.preprocess.measures import PreprocessMeasures
from services.preprocess.prompt import conversation
from services.preprocess.prompt.builder import PromptBuilder
from services.preprocess.prompt.window import Window
from shared.errors import Internal, InvalidRequest, ServingError
from shared.telemetry.logs import Stopwatch
from shared.telemetry.request_names import names
from tessera.preprocess.v1.preprocess_pb2 import (
    PrepareManyRequest,
    PrepareManyResponse,
    PrepareRequest,
    PrepareResponse,
    PrepareResult,
    PrepareTimes,
)

log = structlog.get_logger(__name__)


async def prepare_many(
    builder: PromptBuilder,
    window: Window,
    executor: Executor,
    requests: AsyncIterator[PrepareManyRequest],
    measures: PreprocessMeasures,
) -> AsyncIterator[PrepareManyResponse]:
    """Answers each message in order, in a thread."""
    loop = asyncio.get_running_loop()
    async for request in requests:
        with measures.preparing(len(request.prompts)):
            answer = await loop.run_in_executor(executor, _answer, builder, window, request)
        _count(answer, measures)
        yield answer


def _count(answer: PrepareManyResponse, measures: PreprocessMeasures) -> None:
    for result in answer.results:
        if result.HasField("failure"):
            measures.failed(result.failure.reason)
        else:
            one = result.prepared
            measures.prepared(len(one.token_ids) // 4, one.times.tokenize_us, has_media=False)


def prepare_text(
    builder: PromptBuilder, window: Window, request: PrepareRequest
) -> PrepareResponse:
    """A prompt without media. Raises InvalidRequest."""
    if conversation.media(request.conversation):
        raise InvalidRequest("MEDIA_IN_STREAM", "prompts with media are prepared one by one")
    watch = Stopwatch()
    draft = window.text_draft(builder, request)
    tokenize_us = watch.lap_us()
    log.debug(
        "tokenized",
        **names(request.request_id, request.client_request_id, request.traceparent),
        tokens=len(draft.ids),
        tokenize_us=tokenize_us,
    )
    builder.check_length(len(draft.ids), request.max_prompt_tokens, draft.field)
    return PrepareResponse(
        token_ids=draft.ids.astype("<i4").tobytes(),
        text=draft.text,
        times=PrepareTimes(tokenize_us=tokenize_us),
    )


def _answer(
    builder: PromptBuilder, window: Window, request: PrepareManyRequest
) -> PrepareManyResponse:
    results = [_result(builder, window, prompt) for prompt in request.prompts]
    return PrepareManyResponse(results=results)


def _result(builder: PromptBuilder, window: Window, prompt: PrepareRequest) -> PrepareResult:
    try:
        return PrepareResult(prepared=prepare_text(builder, window, prompt))
    except ServingError as error:
        return PrepareResult(failure=error.to_failure())
    except Exception as error:  # bad input fails one request, never the others of its message
        log.exception(
            "a prompt failed",
            **names(prompt.request_id, prompt.client_request_id, prompt.traceparent),
        )
        failure = Internal("INTERNAL", f"internal error: {type(error).__name__}")
        return PrepareResult(failure=failure.to_failure())
