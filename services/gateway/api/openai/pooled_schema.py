"""The bodies of requests for vectors and scores: OpenAI's, with vLLM's additions, and those of rerankers' clients.

Fields that are not listed are ignored: clients send many.
"""

from typing import Annotated

import msgspec

from services.gateway.api.openai.schema import ChatMessage
from services.gateway.decoding.about import about
from services.gateway.decoding.decode import Whole
from services.gateway.reading.pooling.pooled import Inputs, PooledFields
from services.gateway.reading.pooling.scored_texts import TextPairFields

_NONE = msgspec.Raw()


class InputRequest(PooledFields, kw_only=True):
    """Inputs, or one conversation by the chat template, which may have images."""

    input: Annotated[Inputs | None, about("a text, token ids, or up to 2048 of either")] = None
    messages: Annotated[
        list[ChatMessage] | None,
        about("one conversation, by the chat template, with its media, in place of `input`"),
    ] = None
    chat_template_kwargs: Annotated[
        msgspec.Raw, about("of `messages`: an object, variables for the chat template", "`{}`")
    ] = _NONE
    mm_processor_kwargs: Annotated[
        msgspec.Raw,
        about(
            "of `messages`: options of the model's image processor for their media",
            "the checkpoint's settings",
        ),
    ] = _NONE
    media_io_kwargs: Annotated[
        msgspec.Raw,
        about("of `messages`: how files of media are read, by kind", "the checkpoint's settings"),
    ] = _NONE
    add_generation_prompt: Annotated[
        bool | None,
        about(
            "of `messages`: whether the prompt ends with the begin of the assistant's turn", "false"
        ),
    ] = None
    continue_final_message: Annotated[
        bool | None,
        about("of `messages`: whether the prompt ends where the last message does", "false"),
    ] = None
    prompt_name: Annotated[
        str | None,
        about(
            "a name of `prompts` in `config_sentence_transformers.json`: that text goes before each text",
            "`default_prompt_name`",
        ),
    ] = None
    use_activation: Annotated[
        bool | None,
        about(
            "whether vectors get the length 1, logits become probabilities",
            "as the model's files say",
        ),
    ] = None


class EmbeddingRequest(InputRequest, kw_only=True):
    """POST /v1/embeddings: vectors of texts, or of a conversation."""

    encoding_format: Annotated[
        str | None,
        about("not of `/classify`: `float`, or `base64` of little-endian float32", "`float`"),
    ] = None
    dimensions: Annotated[
        Whole | None,
        about(
            "not of `/classify`: keeps so many numbers, where `config.json` has `is_matryoshka: true` or lists them in"
            " `matryoshka_dimensions`; else a 400",
            "all",
        ),
    ] = None
    normalize: Annotated[
        bool | None, about("not of `/classify`: the older name of `use_activation`")
    ] = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """POST /pooling: whatever the model gives of texts, or of a conversation."""

    task: Annotated[
        str | None, about("of `/pooling` alone: a task of the server", "its first one")
    ] = None


class ClassifyRequest(InputRequest, kw_only=True):
    """POST /classify: labels of texts, or of a conversation."""


class ScoreRequest(TextPairFields, kw_only=True):
    """POST /score: scores of one query with several texts, or of as many queries as texts."""

    queries: Annotated[
        str | list[str] | None,
        about("one text, or as many as `documents`"),
    ] = None
    documents: Annotated[str | list[str] | None, about("texts that are scored")] = None
    items: Annotated[str | list[str] | None, about("another name of `documents`")] = None
    data_1: Annotated[str | list[str] | None, about("beside `data_2` as `queries`")] = None
    data_2: Annotated[str | list[str] | None, about("as `documents`")] = None
    text_1: Annotated[str | list[str] | None, about("the older name of `queries`")] = None
    text_2: Annotated[str | list[str] | None, about("the older name of `documents`")] = None


class TextDocument(msgspec.Struct):
    """A document as some clients send it."""

    text: Annotated[str | None, about("the text itself")] = None


class RerankRequest(TextPairFields, kw_only=True):
    """POST /rerank: texts by how well they answer a query."""

    query: Annotated[str | None, about("what is searched for")] = None
    documents: Annotated[
        list[str | TextDocument] | None, about('texts that are scored; one may be `{"text": ...}`')
    ] = None
    top_n: Annotated[Whole | None, about("how many come back; 0 is all", "all")] = None
    return_documents: Annotated[bool | None, about("whether with their texts", "true")] = None
