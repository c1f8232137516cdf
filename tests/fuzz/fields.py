"""The names of all fields that the body of a route may have, at any depth, read from the types that the gateway reads
bodies into: a field that is added there is sent here.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from services.gateway.api.anthropic.batches.schema import MessageBatchBody
from services.gateway.api.anthropic.schema import MessagesBody
from services.gateway.api.batches.schema import BatchRequest
from services.gateway.api.kserve import schema as kserve
from services.gateway.api.mindie import schema as mindie
from services.gateway.api.ollama.schema import (
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    ShowBody,
)
from services.gateway.api.openai import pooled_schema as pooled
from services.gateway.api.openai import schema as openai
from services.gateway.api.responses.schema import CompactBody, ResponseBody
from services.gateway.api.tgi.schema import GenerateRequest as TgiRequest
from services.gateway.api.vllm import schema as vllm

Kind = type[msgspec.Struct]

# By the beginning of a path: the first that fits.
_KINDS: Mapping[str, Sequence[Kind]] = {
    "/v1/chat/completions": (openai.ChatRequest,),
    "/v1/completions": (openai.CompletionRequest,),
    "/v1/responses/compact": (CompactBody,),
    "/v1/responses": (ResponseBody,),
    "/v1/messages/batches": (MessageBatchBody, MessagesBody),
    "/v1/messages": (MessagesBody,),
    "/v1/batches": (BatchRequest,),
    "/v1/load_lora_adapter": (vllm.LoadAdapterRequest,),
    "/v1/unload_lora_adapter": (vllm.UnloadAdapterRequest,),
    "/v1/tokenizer": (mindie.TokenizeRequest,),
    "/v1/tokenize": (openai.TokenizeRequest,),
    "/tokenize": (openai.TokenizeRequest,),
    "/v1/detokenize": (openai.DetokenizeRequest,),
    "/detokenize": (openai.DetokenizeRequest,),
    "/v1/embeddings": (pooled.EmbeddingRequest,),
    "/pooling": (pooled.PoolingRequest,),
    "/classify": (pooled.ClassifyRequest,),
    "/v1/score": (pooled.ScoreRequest,),
    "/score": (pooled.ScoreRequest,),
    "/v1/rerank": (pooled.RerankRequest,),
    "/v2/rerank": (pooled.RerankRequest,),
    "/rerank": (pooled.RerankRequest,),
    "/api/embed": (EmbedBody, EmbeddingsBody),
    "/api/": (ChatBody, GenerateBody, ShowBody),
    "/v2/": (kserve.GenerateRequest, kserve.InferRequest, mindie.StopRequest),
    "/infer": (mindie.InferRequest,),
    "/generate": (TgiRequest, vllm.GenerateRequest),
    "/": (TgiRequest,),
}


@functools.cache
def fields_of(route: str) -> Sequence[str]:
    """The names, without repetition, and one that no route has."""
    kinds = next(kinds for root, kinds in _KINDS.items() if route.startswith(root))
    names: dict[str, None] = {"unknown": None}
    seen: set[type] = set()
    for kind in kinds:
        for struct in _structs(msgspec.inspect.type_info(kind), seen):
            names |= dict.fromkeys(field.encode_name for field in struct.fields)
    return list(names)


def _structs(kind: Any, seen: set[type]) -> Iterator[msgspec.inspect.StructType]:
    """The structs within a type, each once."""
    match kind:
        case msgspec.inspect.StructType() if kind.cls not in seen:
            seen.add(kind.cls)
            yield kind
            inner = [field.type for field in kind.fields]
        case msgspec.inspect.UnionType():
            inner = list(kind.types)
        case msgspec.inspect.ListType():
            inner = [kind.item_type]
        case msgspec.inspect.Metadata():
            inner = [kind.type]
        case msgspec.inspect.DictType():
            inner = [kind.value_type]
        case _:
            inner = []
    for one in inner:
        yield from _structs(one, seen)
