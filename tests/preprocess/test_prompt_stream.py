"""Several prompts in a message: each result is the one it would have alone."""

import pytest

from shared.errors import from_failure
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    PrepareManyRequest,
    PrepareManyResponse,
    PrepareRequest,
)
from tests.support.preprocess.service import RunningPreprocess, file_of, image, picture, text, turn


@pytest.mark.asyncio(loop_scope="module")
async def test_a_message_is_answered_in_order_and_a_bad_prompt_fails_alone(
    llama_service: RunningPreprocess,
) -> None:
    chat = PrepareRequest(conversation=Conversation(messages=[turn("user", text("hi"))]))
    good = [PrepareRequest(text="The red circle"), chat, PrepareRequest(text="the blue square")]
    bad = PrepareRequest(text="")
    seen = PrepareRequest(
        conversation=Conversation(messages=[turn("user", image(file_of(picture())))])
    )
    long = PrepareRequest(text="The red circle", max_prompt_tokens=1)
    alone = [await llama_service.prepare(request) for request in good]
    call = llama_service.stub.PrepareMany()
    for _ in range(2):
        prompts = [good[0], bad, good[1], seen, long, good[2]]
        await call.write(PrepareManyRequest(prompts=prompts))
        answer = await call.read()
        assert isinstance(answer, PrepareManyResponse)
        results = answer.results
        prepared = [results[i].prepared for i in (0, 2, 5)]
        assert [p.token_ids for p in prepared] == [p.token_ids for p in alone]
        assert [p.text for p in prepared] == [p.text for p in alone]
        errors = [from_failure(results[i].failure) for i in (1, 3, 4)]
        reasons = [error.reason for error in errors]
        assert reasons == ["EMPTY_PROMPT", "MEDIA_IN_STREAM", "CONTEXT_LENGTH_EXCEEDED"]
        assert errors[2].metadata["field"] == "prompt"
    await call.done_writing()
