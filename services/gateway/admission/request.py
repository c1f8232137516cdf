"""One validated request, the same whichever API it came by."""

from dataclasses import dataclass

from services.gateway.admission.cache_salt import salt_of
from services.gateway.admission.model import ServedModel
from services.gateway.admission.request_options import NO_OPTIONS, RequestOptions
from services.gateway.reading.data_urls import InlineMedia
from shared.errors import InvalidRequest
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest, PrepareResponse
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, RequestSpec


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
    # Whether `prepare` goes to preprocess together with others (`prompt_stream.py`).
    has_short_prompt: bool = True
    # Where `prepare` has tickets for media.
    inline_media: InlineMedia | None = None

    def cost_bound(self, model: ServedModel) -> int:
        """Tokens that it costs at the very most: one prompt, and `best_of` answers."""
        most = self.sampling.max_tokens or model.default_max_tokens(model.max_model_len)
        one = min(model.max_model_len, self.prompt_bound + most)
        return one + (self.sampling.best_of - 1) * most


def make_spec(
    request: ValidRequest,
    prepared: PrepareResponse,
    model: ServedModel,
    options: RequestOptions = NO_OPTIONS,
    *,
    request_id: str,
    tenant: str,
    created_unix_s: int,
    traceparent: str = "",
    shares_prefixes: bool = True,
    client_request_id: str = "",
) -> RequestSpec:
    """The request as it stands in the queue, with every default filled in. `shares_prefixes`: with those of
    other tenants.

    Raises InvalidRequest if prompt and answer do not fit into the model's length together.
    """
    prompt_tokens = len(prepared.token_ids) // 4
    if prompt_tokens == 0:
        raise InvalidRequest("EMPTY_PROMPT", "the prompt has no tokens", field="prompt")
    sampling = SamplingParams()
    sampling.CopyFrom(request.sampling)
    left = model.max_model_len - prompt_tokens
    wanted = max(1, sampling.max_tokens)
    if wanted > left:
        raise InvalidRequest(
            "CONTEXT_LENGTH_EXCEEDED",
            # OpenAI's text: LiteLLM and LangChain know the error by them.
            f"This model's maximum context length is {model.max_model_len} tokens. However, you "
            f"requested {prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt, {wanted} in "
            "the completion): shorten the prompt, or lower max_tokens",
            field="max_tokens" if left > 0 else "messages",
        )
    sampling.max_tokens = sampling.max_tokens or model.default_max_tokens(left)
    sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
    spec = RequestSpec(
        request_id=request_id,
        model=model.name,
        prompt=prepared.token_ids,
        media=prepared.media,
        sampling=sampling,
        tenant=tenant,
        created_unix_s=created_unix_s,
        reply=request.reply,
        traceparent=traceparent,
        client_request_id=client_request_id,
        timeout_ms=options.timeouts.request_ms,
        queue_timeout_ms=options.timeouts.queue_ms,
        first_token_timeout_ms=options.timeouts.first_token_ms,
        keep_ms=options.keep_ms,
        media_cost=sum(item.rows for item in prepared.media),
        cache_salt=salt_of("" if shares_prefixes else tenant, request.cache_salt),
    )
    return spec
