"""POST /v1/embeddings, /pooling and /classify."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from services.gateway.admission.caller import Caller
from services.gateway.api.openai.pooled_replies import BASE64, FLOAT, item, listed, written
from services.gateway.api.openai.pooled_schema import (
    ClassifyRequest,
    EmbeddingRequest,
    InputRequest,
    PoolingRequest,
)
from services.gateway.api.openai.requests import media_urls, read_conversation
from services.gateway.api.openai.schema import TokenizeRequest
from services.gateway.api.pooling import PooledBody, PooledPrompt, Pooling
from services.gateway.decoding.bounds import wrong
from services.gateway.http.exchange import Exchange
from services.gateway.model.pooled_model import Floats, PooledModel, Task
from services.gateway.reading.calls.tools import read_tools
from services.gateway.reading.generation import Prompt, conversation_prompt
from services.gateway.reading.media.data_urls import InlineMedia, decode_with_media
from services.gateway.reading.media.media_options import read_media_options
from services.gateway.reading.pooling.pooled import (
    finishing,
    read_inputs,
    read_pooled_prompt,
    read_prompt_name,
    read_task,
    require_messages_alone,
)

_EMBEDDINGS, _CLASSES, _POOLED = "embd-", "classify-", "pool-"


class Vectors:
    """The handlers of what becomes of one text or conversation."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling

    async def embeddings(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/embeddings."""
        await self._pooling.answer(exchange, caller, self._read_embeddings)

    async def pooled(self, exchange: Exchange, caller: Caller) -> None:
        """POST /pooling."""
        await self._pooling.answer(exchange, caller, self._read_pooled)

    async def classes(self, exchange: Exchange, caller: Caller) -> None:
        """POST /classify."""
        await self._pooling.answer(exchange, caller, self._read_classify)

    def _read_embeddings(self, exchange: Exchange, body: bytes) -> PooledBody:
        decoded = decode_with_media(body, EmbeddingRequest, media_urls)
        content, pooled = decoded.content, self._pooling.served(Task.EMBED)
        finish, encoding = _finishing(content, pooled), _encoding(content)

        def data(found: Sequence[PooledPrompt]) -> Iterator[str]:
            for index, one in enumerate(found):
                yield item("embedding", index, embedding=written(finish(one.vector), encoding))

        return self._body(exchange, decoded.json, content, decoded.media, pooled, _EMBEDDINGS, data)

    def _read_pooled(self, exchange: Exchange, body: bytes) -> PooledBody:
        decoded = decode_with_media(body, PoolingRequest, media_urls)
        content, model = decoded.content, self._pooling.model
        pooled = self._pooling.served(read_task(content.task, model))
        finish, encoding = _finishing(content, pooled), _encoding(content)

        def data(found: Sequence[PooledPrompt]) -> Iterator[str]:
            for index, one in enumerate(found):
                yield item("pooling", index, data=written(finish(one.vector), encoding))

        return self._body(exchange, decoded.json, content, decoded.media, pooled, _POOLED, data)

    def _read_classify(self, exchange: Exchange, body: bytes) -> PooledBody:
        decoded = decode_with_media(body, ClassifyRequest, media_urls)
        content, pooled = decoded.content, self._pooling.served(Task.CLASSIFY)
        finish = _finishing(content, pooled)

        def data(found: Sequence[PooledPrompt]) -> Iterator[str]:
            for index, one in enumerate(found):
                values = finish(one.vector)
                label = pooled.labels[int(np.argmax(values))]
                more = {"label": label, "probs": values.tolist(), "num_classes": len(values)}
                yield item("classify", index, **more)

        return self._body(exchange, decoded.json, content, decoded.media, pooled, _CLASSES, data)

    def _body(
        self,
        exchange: Exchange,
        body: bytes,
        content: InputRequest,
        media: InlineMedia,
        pooled: PooledModel,
        prefix: str,
        data: Callable[[Sequence[PooledPrompt]], Iterator[str]],
    ) -> PooledBody:
        model = self._pooling.model
        prompts, fields = self._prompts(content, pooled)
        requests = [read_pooled_prompt(content, prompt, model, pooled) for prompt in prompts]
        requests[0] = replace(requests[0], inline_media=media)

        def write(request_id: str, found: Sequence[PooledPrompt]) -> Iterator[str]:
            return listed(prefix, request_id, model.name, found, data(found))

        options = self._pooling.read_options(exchange, content, body)
        return PooledBody(requests, fields, options, write)

    def _prompts(
        self, content: InputRequest, pooled: PooledModel
    ) -> tuple[Sequence[Prompt], Sequence[str]]:
        """The prompts, and where the body has each."""
        model = self._pooling.model
        if content.messages is None:
            before = read_prompt_name(content.prompt_name, pooled)
            prompts = read_inputs(content.input, model, before)
            if len(prompts) == 1 and not _is_list_of_prompts(content.input):
                return prompts, ["input"]
            return prompts, [f"input[{index}]" for index in range(len(prompts))]
        require_messages_alone(content.input, content.prompt_name)
        asked = TokenizeRequest(
            messages=content.messages,
            chat_template_kwargs=content.chat_template_kwargs,
            # Nobody answers here.
            add_generation_prompt=content.add_generation_prompt is True,
            continue_final_message=content.continue_final_message,
            mm_processor_kwargs=content.mm_processor_kwargs,
            media_io_kwargs=content.media_io_kwargs,
        )
        tools = read_tools(asked, model.forms, may_call=False)
        prepare = read_conversation(asked, tools)
        read_media_options(asked, prepare)
        return [conversation_prompt(prepare, model)], ["messages"]


def _is_list_of_prompts(inputs: object) -> bool:
    return isinstance(inputs, list) and isinstance(inputs[0], str | list)


def _finishing(content: InputRequest, pooled: PooledModel) -> Callable[[Floats], Floats]:
    """From a vector as decoders give it to what a reply shows. Raises InvalidRequest."""
    activates = content.use_activation
    dimensions: float | None = None
    if isinstance(content, EmbeddingRequest):
        dimensions = content.dimensions
        if content.normalize is not None:
            if activates not in (None, content.normalize):
                raise wrong("normalize", "contradicts use_activation: leave one of them out")
            activates = content.normalize
    return finishing(pooled, dimensions, activates)


def _encoding(content: EmbeddingRequest) -> str:
    encoding = content.encoding_format or FLOAT
    if encoding not in (FLOAT, BASE64):
        raise wrong("encoding_format", f"must be {FLOAT} or {BASE64}, not {encoding[:32]!r}")
    return encoding
