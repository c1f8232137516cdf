"""Replies that a model's own code cleans up: whole, resumed, and where they stay as they are."""

from dataclasses import replace
from typing import Any

import pytest

from services.gateway.following.answer import AnswerFold
from services.gateway.reading.generation import conversation_prompt, read_generation, text_prompt
from services.gateway.reading.options import GenerationOptions
from shared.text.text_fold import TokenBytes
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.preprocess.v1.preprocess_pb2 import Conversation, Message, Part, PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, ReplyKind, RequestSpec
from tests.support.gateway.served_model import model

STEPS = ["strip", "training_date", "wide_punctuation"]
TEXTS = ["\n", " ", "你", "好", ",", "a", "!", "[[", "训练时间", "]]", "<end>"]
TABLE = TokenBytes([text.encode() for text in TEXTS], special_ids=[10])
TOKENS = [TEXTS.index(text) for text in ["\n", " ", "你", "好", "!", " ", "a", ",", "a", ",", "好"]]
TOKENS += [TEXTS.index(text) for text in ["[[", "训练时间", "]]", " ", "[[", "\n", "<end>"]]
SHOWN = "你好！ a,a，好2023年 [["
STOP = Ending(reason=FinishReason.FINISH_REASON_STOP)


def fold() -> AnswerFold:
    reply = ReplyFormat(skip_special_tokens=True, clean_up=STEPS)
    return AnswerFold(TABLE, RequestSpec(reply=reply), None)


def test_a_reply_is_the_same_however_its_tokens_arrive() -> None:
    single = fold()
    pieces = [single.push([token], None).text for token in TOKENS[:-1]]
    pieces.append(single.push(TOKENS[-1:], STOP).text)
    assert "".join(pieces) == SHOWN
    for sent in range(len(TOKENS)):
        # Another gateway goes on behind what the client has.
        resumed = fold()
        before = resumed.push(TOKENS[:sent], None).text
        assert before == "".join(pieces[:sent])
        assert before + resumed.push(TOKENS[sent:], STOP).text == SHOWN


@pytest.mark.parametrize(
    ("is_chat", "options", "cleaned"),
    [
        (True, {}, True),
        (True, {"skip_special_tokens": False}, False),
        (False, {}, False),
    ],
)
def test_chats_alone_are_cleaned(is_chat: bool, options: dict[str, Any], cleaned: bool) -> None:
    served = replace(model(), clean_up=tuple(STEPS))
    message = Message(role="user", content=[Part(text="Hi.")])
    prepare = PrepareRequest(conversation=Conversation(messages=[message]))
    prompt = conversation_prompt(prepare, served) if is_chat else text_prompt("Hi.")
    kind = ReplyKind.REPLY_KIND_CHAT if is_chat else ReplyKind.REPLY_KIND_COMPLETION
    request = read_generation(GenerationOptions(**options), prompt, kind, None, served)
    assert list(request.reply.clean_up) == (STEPS if cleaned else [])
