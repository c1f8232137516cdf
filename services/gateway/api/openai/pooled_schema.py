"""The bodies of requests for vectors and scores: OpenAI's, with vLLM's additions, and those of rerankers' clients.

Fields that are not listed are ignored: clients send many.
"""

import msgspec

from services.gateway.api.openai.schema import ChatMessage
from services.gateway.decoding.decode import Whole
from services.gateway.reading.pooled import Inputs, PooledFields

_NONE = msgspec.Raw()


class InputRequest(PooledFields, kw_only=True):
    """Inputs, or one conversation by the chat template, which may have images."""

    input: Inputs | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: msgspec.Raw = _NONE
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # The name of a text of the model's files that goes before inputs (sentence-transformers).
    prompt_name: str | None = None
    # Whether vectors get the length 1, logits become probabilities; as the model's files say unless given.
    use_activation: bool | None = None


class EmbeddingRequest(InputRequest, kw_only=True):
    """POST /v1/embeddings."""

    encoding_format: str | None = None
    dimensions: Whole | None = None
    normalize: bool | None = None  # the older name of `use_activation`


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """POST /pooling."""

    task: str | None = None


class ClassifyRequest(InputRequest, kw_only=True):
    """POST /classify."""


class TextPairFields(PooledFields, kw_only=True):
    """What a query and texts are scored by."""

    # What the model is told of the task, where it is told one.
    instruction: str | None = None
    use_activation: bool | None = None


class ScoreRequest(TextPairFields, kw_only=True):
    """POST /score: one query with several texts, or as many queries as texts."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    # Their older names.
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


class TextDocument(msgspec.Struct):
    """A document as some clients send it."""

    text: str | None = None


class RerankRequest(TextPairFields, kw_only=True):
    """POST /rerank."""

    query: str | None = None
    documents: list[str | TextDocument] | None = None
    top_n: Whole | None = None
    return_documents: bool | None = None
