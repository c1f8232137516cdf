"""The messages of vectors and scores, checked and turned into our own types."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.api.pooling import Pooling
from services.gateway.api.tessera.grpc_conversation import as_raw, read_conversation
from services.gateway.api.tessera.grpc_requests import value_or_none
from services.gateway.decoding.bounds import at_most, whole, wrong
from services.gateway.model.pooled_model import Floats, Task
from services.gateway.reading.generation import Prompt, conversation_prompt
from services.gateway.reading.media.media_options import MediaFields, read_media_options
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.pooling.pooled import (
    MOST_INPUTS,
    PooledFields,
    finishing,
    read_inputs,
    read_pooled_prompt,
    read_prompt_name,
    read_task,
    require_messages_alone,
)
from services.gateway.reading.pooling.scored_texts import ScoredTexts, TextPairFields, read_texts
from services.gateway.reading.valid_request import ValidRequest
from tessera.gateway.v1.vectors_pb2 import PoolInput, PoolRequest, RerankRequest, ScoreRequest
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest


@dataclass(frozen=True, slots=True)
class Inputs:
    """Prompts that become vectors, and where a message has each of them."""

    requests: Sequence[ValidRequest]
    fields: Sequence[str]
    finish: Callable[[Floats], Floats]  # from a vector as decoders give it to what a response shows
    labels: Sequence[str]  # of its numbers, where they have names


def read_pool(request: PoolRequest, pooling: Pooling) -> tuple[Inputs, GenerationOptions]:
    """Inputs or a conversation. Raises InvalidRequest naming the field as REST does, or NotFound."""
    model = pooling.model
    task = read_task(request.task or None, model)
    pooled = pooling.served(task)
    finish = finishing(
        pooled, value_or_none(request, "dimensions"), value_or_none(request, "use_activation")
    )
    name = value_or_none(request, "prompt_name")
    prompts: Sequence[Prompt]
    if request.messages:
        require_messages_alone(request.input or None, name)
        conversation = read_conversation(request.messages, request.chat_template_kwargs_json)
        conversation.continue_final_message = request.continue_final_message
        conversation.add_generation_prompt = request.add_generation_prompt
        if request.add_generation_prompt and request.continue_final_message:
            raise wrong(
                "add_generation_prompt",
                "cannot be true beside continue_final_message: the last message is gone on with",
            )
        prepare = PrepareRequest(conversation=conversation)
        media = MediaFields(
            mm_processor_kwargs=as_raw(request.mm_processor_kwargs_json),
            media_io_kwargs=as_raw(request.media_io_kwargs_json),
        )
        read_media_options(media, prepare)
        prompts = [conversation_prompt(prepare, model)]
        fields = ["messages"]
    else:
        at_most("input", len(request.input), MOST_INPUTS)
        given: list[Any] = [_input(one) for one in request.input]
        prompts = read_inputs(given or None, model, read_prompt_name(name, pooled))
        fields = [f"input[{index}]" for index in range(len(prompts))]
    options = PooledFields(**_options(request))
    requests = [read_pooled_prompt(options, prompt, model, pooled) for prompt in prompts]
    labels = pooled.labels if task is Task.CLASSIFY else ()
    return Inputs(requests, fields, finish, labels), options.options()


def read_score(request: ScoreRequest, pooling: Pooling) -> tuple[ScoredTexts, GenerationOptions]:
    """Queries and texts. Raises InvalidRequest naming the field as REST does, or NotFound."""
    return _scored(request, request.queries, "queries", pooling)


def read_rerank(request: RerankRequest, pooling: Pooling) -> tuple[ScoredTexts, GenerationOptions]:
    """A query and texts. Raises InvalidRequest naming the field as REST does, or NotFound."""
    whole("top_n", value_or_none(request, "top_n"), 0, 1 << 31)
    return _scored(request, request.query, "query", pooling)


def _scored(
    request: ScoreRequest | RerankRequest,
    queries: str | Sequence[str],
    query_field: str,
    pooling: Pooling,
) -> tuple[ScoredTexts, GenerationOptions]:
    texts = read_texts(queries, request.documents, query_field, "documents")
    asked = TextPairFields(
        instruction=value_or_none(request, "instruction"),
        use_activation=value_or_none(request, "use_activation"),
        **_options(request),
    )
    pooled = pooling.served(Task.SCORE)
    return ScoredTexts(asked, texts, pooling.model, pooled), asked.options()


def _input(given: PoolInput) -> str | list[int]:
    if given.WhichOneof("prompt") == "token_ids":
        return list(given.token_ids.ids)
    return given.text


def _options(request: PoolRequest | ScoreRequest | RerankRequest) -> dict[str, Any]:
    """The fields of `PooledFields`; what is not set is None."""
    options = request.options
    optional = (
        "truncate_prompt_tokens", "add_special_tokens", "priority", "timeout", "cache_salt",
    )  # fmt: skip
    return {
        "model": request.model or None,
        "user": options.user or None,
        "service_tier": options.service_tier or None,
        **{name: value_or_none(options, name) for name in optional},
    }
