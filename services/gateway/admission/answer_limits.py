"""Limits on answers that are sent whole: how large one may become by what is asked for, and all together."""

from collections.abc import Sequence

from services.gateway.body_budget import BodyBudget
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.valid_request import ValidRequest
from services.gateway.reply_kinds import CHATS, WITH_TOP_LOGPROBS
from shared.errors import InvalidRequest, Unavailable

# Bytes of JSON, for most vocabularies with room to spare: of a token's text and id, and of one log-probability with the
# token that it is of. An answer is made in pieces, so one that is larger still costs nobody else.
_TOKEN = 16
_LOGPROB = 100
_NUMBER = 24  # of a vector, as JSON


class AnswerLimits:
    """The largest whole answer, and what all that are under way may have together."""

    def __init__(self, most_bytes: int, most_bytes_in_flight: int) -> None:
        self._most_bytes = most_bytes
        self._budget = _AnswerBudget(max(most_bytes, most_bytes_in_flight))

    def take(self, requests: Sequence[ValidRequest], model: ServedModel) -> int:
        """Reserves the bytes of a reply to some prompts, and returns how many: they must be given back.

        Raises InvalidRequest, naming the fields, for more than one reply may have, and Unavailable when too much is
        under way.
        """
        size = sum(answer_bytes(request, model) for request in requests)
        if size > self._most_bytes:
            raise _too_large(requests[0], size, self._most_bytes)
        self._budget.take(size)
        return size

    def give_back(self, size: int) -> None:
        """Ends the reservation of so many bytes."""
        self._budget.give_back(size)


def answer_bytes(request: ValidRequest, model: ServedModel) -> int:
    """The bytes of the answer to one prompt where every choice becomes as long as it may."""
    if request.pooling is not None:
        return request.pooling.width * _NUMBER
    sampling, reply = request.sampling, request.reply
    prompt = min(request.prompt_bound, model.max_model_len)
    most = sampling.max_tokens or model.default_max_tokens(model.max_model_len)
    each = _TOKEN
    if reply.message.reasoning:  # which is sent under two names
        each += _TOKEN
    if sampling.HasField("logprobs"):
        each += _LOGPROB * (1 + sampling.logprobs)
    choice = 0 if reply.prompt_only else most * each
    if reply.echo:
        choice += prompt * each
    else:
        choice += len(reply.prompt_text.encode())
    return sampling.n * choice + _scores_bytes(request, prompt)


def _scores_bytes(request: ValidRequest, prompt: int) -> int:
    """Those of `prompt_logprobs`, which each choice of completions has."""
    if not request.reply.HasField("prompt_logprobs"):
        return 0
    is_chat = request.reply.kind in CHATS
    scores = prompt * _LOGPROB * (1 + request.reply.prompt_logprobs)
    return scores if is_chat else request.sampling.n * scores


def _too_large(request: ValidRequest, size: int, limit: int) -> InvalidRequest:
    if request.pooling is not None:
        return InvalidRequest(
            "ANSWER_TOO_LARGE",
            f"input: the vectors may take {size} bytes; the limit is {limit} (--max-answer-bytes): send fewer at once",
            field="input",
        )
    sampling, reply = request.sampling, request.reply
    fields = ["max_tokens"]
    if sampling.n > 1:
        fields.append("n")
    if sampling.HasField("logprobs"):
        counts = reply.kind in WITH_TOP_LOGPROBS
        fields.append("top_logprobs" if counts else "logprobs")
    if reply.HasField("prompt_logprobs"):
        fields.append("prompt_logprobs")
    repeated = (
        " and the prompt, which each choice repeats" if reply.prompt_text and not reply.echo else ""
    )
    return InvalidRequest(
        "ANSWER_TOO_LARGE",
        f"the answer may become as large as {size} bytes, by {', '.join(fields)}{repeated}; the limit is {limit}"
        " (--max-answer-bytes): lower them, or set stream to true",
        field=fields[-1],
    )


class _AnswerBudget(BodyBudget):
    def _full(self) -> Unavailable:
        return Unavailable(
            "TOO_MANY_ANSWERS",
            f"the answers under way at this gateway may become {self.held} bytes, of {self._limit} at most"
            " (--max-answer-bytes-in-flight): retry in a moment, or set stream to true",
        )
