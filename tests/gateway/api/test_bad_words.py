"""Words that must not come are tokenized where that keeps no other request waiting."""

import threading
from typing import Any

import pytest

from shared.net.channels import open_channel
from shared.text.tokenizer_library import token_ids
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart, GenerationOptions
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import MODEL, Stage

MANY = [f"{place} is a word that must not come" for place in range(200)]


@pytest.fixture
def tokenized_by(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that tokenize such words."""
    threads: set[int] = set()

    def recorded(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return token_ids(*arguments)

    monkeypatch.setattr("services.gateway.reading.sampling.bad_words.token_ids", recorded)
    return threads


async def test_many_words_are_tokenized_beside_the_event_loop(
    stage: Stage, tokenized_by: set[int]
) -> None:
    await stage.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is there?"}],
        extra_body={"bad_words": MANY},
    )
    assert tokenized_by
    message = ChatMessage(role="user", content=[ContentPart(text="What is there?")])
    request = ChatRequest(messages=[message], options=GenerationOptions(bad_words=MANY))
    async with open_channel(stage.gateway.grpc_address) as channel:
        assert [event async for event in ChatServiceStub(channel).Chat(request)]
    assert threading.get_ident() not in tokenized_by
    [first, second] = stage.scheduler.played.values()
    assert list(first.spec.sampling.bad_words) == list(second.spec.sampling.bad_words)
