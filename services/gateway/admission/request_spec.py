"""The request as it stands in the queue."""

from services.gateway.admission.cache_salt import salt_of
from services.gateway.admission.request_options import NO_OPTIONS, RequestOptions
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import InvalidRequest
from shared.prompts.length import require_answer_fits, require_prompt_fits
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.preprocess.v1.preprocess_pb2 import PrepareResponse
from tessera.scheduler.v1.queue_pb2 import RequestSpec


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
    traced: bool = False,
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
    longest = model.max_model_len
    field = "messages" if request.prepare.HasField("conversation") else "prompt"
    require_prompt_fits(prompt_tokens, longest, field, longest - 1)
    left = longest - prompt_tokens
    if request.lowers_max_tokens and left > 0:
        sampling.max_tokens = min(sampling.max_tokens, left)
    require_answer_fits(prompt_tokens, max(1, sampling.max_tokens), longest)
    sampling.max_tokens = sampling.max_tokens or model.default_max_tokens(left)
    sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
    spec = RequestSpec(
        request_id=request_id,
        model=request.adapter or model.name,
        lora_id=request.lora_id,
        prompt=prepared.token_ids,
        media=prepared.media,
        sampling=sampling,
        tenant=tenant,
        created_unix_s=created_unix_s,
        reply=request.reply,
        traceparent=traceparent,
        traced=traced,
        client_request_id=client_request_id,
        timeout_ms=options.timeouts.request_ms,
        queue_timeout_ms=options.timeouts.queue_ms,
        first_token_timeout_ms=options.timeouts.first_token_ms,
        keep_ms=options.keep_ms,
        media_cost=sum(item.rows for item in prepared.media),
        cache_salt=salt_of("" if shares_prefixes else tenant, request.cache_salt),
    )
    if request.pooling is not None:
        spec.pooling.CopyFrom(request.pooling)
    if request.constraint is not None:
        spec.reply.form_field = request.constraint.field
    if spec.reply.HasField("message"):
        _read_beginning(spec, request, prepared, model)
    return spec


def _read_beginning(
    spec: RequestSpec, request: ValidRequest, prepared: PrepareResponse, model: ServedModel
) -> None:
    """Whether the prompt has opened the reasoning, and what follows from that."""
    message = spec.reply.message
    reasoning = model.forms.of(message).reasoning
    if reasoning is None or not prepared.text.rstrip().endswith(reasoning.open):
        return
    within = request.within_reasoning
    # Where the answer is held to a form of the client's it has no reasoning that could end.
    message.in_reasoning = within is not None or request.constraint is None
    if within is not None:
        spec.sampling.grammar = within.sampling.grammar
