"""One validated request, the same whichever API it came by."""

from dataclasses import dataclass

from services.gateway.model.served_model import ServedModel
from services.gateway.reading.constraint import Constraint
from services.gateway.reading.media.data_urls import InlineMedia
from tessera.common.v1.pooling_pb2 import PoolingParams
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyFormat


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """What to prepare, how to sample, how to answer.

    `prompt_bound` is an upper bound of the prompt's tokens: what is reserved in the queue before
    anything is tokenized.
    """

    prepare: PrepareRequest
    sampling: SamplingParams
    reply: ReplyFormat
    stream: bool
    user: str
    prompt_bound: int
    # Lower goes first.
    priority: int = 0
    # Only requests with the same share computed prefixes; empty is none.
    cache_salt: str = ""
    # Name and digest of the adapter; empty is the model itself. The name may get another digest, the request does not.
    adapter: str = ""
    lora_id: str = ""
    # Whether `prepare` goes to preprocess together with others (`prompt_stream.py`).
    has_short_prompt: bool = True
    # The form of the answer: `sampling` has its grammar once that is compiled, before the request is admitted.
    constraint: Constraint | None = None
    # The same with the form of an answer whose prompt ends within reasoning, where that is another.
    within_reasoning: "ValidRequest | None" = None
    # Whether `sampling.max_tokens` is lowered to what the prompt leaves of the model's length, in place of a refusal.
    lowers_max_tokens: bool = False
    # What its prompt becomes where no text is generated.
    pooling: PoolingParams | None = None
    # Where `prepare` has tickets for media.
    inline_media: InlineMedia | None = None

    def cost_bound(self, model: ServedModel) -> int:
        """Tokens that it costs at the very most: one prompt, and `best_of` answers."""
        most = self.sampling.max_tokens or model.default_max_tokens(model.max_model_len)
        one = min(model.max_model_len, self.prompt_bound + most)
        return one + (self.sampling.best_of - 1) * most
