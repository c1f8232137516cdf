"""Greedy answers of a whole system, with their token ids."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

Chat = Sequence[Mapping[str, Any]]  # messages
Answer = tuple[list[int], list[int]]  # ids of the prompt, and of the answer


def ask_all(url: str, chats: Sequence[Chat], max_tokens: int) -> list[Answer]:
    """Of several chats at once; each has `max_tokens` tokens. Raises what the client raises for one that is refused."""
    return asyncio.run(_ask_all(url, chats, max_tokens))


async def _ask_all(url: str, chats: Sequence[Chat], max_tokens: int) -> list[Answer]:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(_ask(client, chat, max_tokens) for chat in chats))


async def _ask(client: AsyncOpenAI, chat: Chat, max_tokens: int) -> Answer:
    answer: Any = await client.chat.completions.create(
        model="under-test",
        messages=chat,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer.prompt_token_ids, answer.choices[0].token_ids


def assert_ends(url: str, ends: Sequence[int]) -> None:
    """Each of these tokens ends an answer at once, in chats and completions alike, and is no text of it; not so where
    the client ignores the model's ends."""
    asyncio.run(_assert_ends(url, ends))


async def _assert_ends(url: str, ends: Sequence[int]) -> None:
    chat: Any = {"messages": [{"role": "user", "content": "What?"}]}
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for end in ends:
            options: Any = {"model": "under-test", "max_tokens": 3, "temperature": 0}
            options["logit_bias"] = {str(end): 100}
            replies: list[Any] = [
                await client.chat.completions.create(**options, **chat),
                await client.completions.create(**options, prompt=[1, 2, 3]),
            ]
            texts = [replies[0].choices[0].message.content, replies[1].choices[0].text]
            assert texts == ["", ""], end
            assert [reply.choices[0].finish_reason for reply in replies] == ["stop", "stop"], end
            assert [reply.usage.completion_tokens for reply in replies] == [1, 1], end
            goes_on: Any = {"extra_body": {"ignore_eos": True}}
            ignored: Any = await client.chat.completions.create(**options, **chat, **goes_on)
            assert ignored.choices[0].finish_reason == "length", end
