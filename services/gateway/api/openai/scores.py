"""POST /score and /rerank: how well texts answer queries."""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from services.gateway.admission.caller import Caller
from services.gateway.api.openai.pooled_replies import item, listed, usage
from services.gateway.api.openai.pooled_schema import (
    RerankRequest,
    ScoreRequest,
    TextDocument,
    TextPairFields,
)
from services.gateway.api.pooling import PooledBody, PooledPrompt, Pooling
from services.gateway.decoding.bounds import at_most, whole, wrong
from services.gateway.decoding.decode import decode
from services.gateway.http.exchange import Exchange
from services.gateway.model.pooled_model import PooledModel, Task
from services.gateway.reading.generation import Prompt, text_prompt
from services.gateway.reading.pooled import MOST_INPUTS, joined, read_pooled_prompt, texts_of
from services.gateway.reading.rerank_prompt import answering_prompt
from services.gateway.reading.unsupported import unsupported
from tessera.common.v1.pooling_pb2 import PoolingHead

_SCORES, _RERANKS = "score-", "rerank-"
# Names that sentence-transformers gives to the texts before documents.
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")


class Texts(NamedTuple):
    """Queries and texts, pair by pair where there are several queries, and where the body has them."""

    queries: Sequence[str]
    documents: Sequence[str]
    query_field: str
    document_field: str


class Scores:
    """The handlers of what becomes of a query and a text."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling

    async def score(self, exchange: Exchange, caller: Caller) -> None:
        """POST /score."""
        await self._pooling.answer(exchange, caller, self._read_score)

    async def rerank(self, exchange: Exchange, caller: Caller) -> None:
        """POST /rerank."""
        await self._pooling.answer(exchange, caller, self._read_rerank)

    def _read_score(self, exchange: Exchange, body: bytes) -> PooledBody:
        content = decode(body, ScoreRequest)
        texts = _score_texts(content)
        asked = _Asked(self._pooling, content, texts)

        def write(request_id: str, found: Sequence[PooledPrompt]) -> Iterator[str]:
            scores = asked.scores(found)
            data = (item("score", index, score=one) for index, one in enumerate(scores))
            return listed(_SCORES, request_id, self._pooling.model.name, found, data)

        options = self._pooling.read_options(exchange, content, body)
        return PooledBody(asked.requests, asked.fields, options, write)

    def _read_rerank(self, exchange: Exchange, body: bytes) -> PooledBody:
        content = decode(body, RerankRequest)
        texts = _rerank_texts(content)
        top_n = whole("top_n", content.top_n, 1, 1 << 31) or len(texts.documents)
        asked = _Asked(self._pooling, content, texts)

        def write(request_id: str, found: Sequence[PooledPrompt]) -> Iterator[str]:
            scores = asked.scores(found)
            # Of equal ones the first comes first.
            ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
            yield json.dumps({"id": _RERANKS + request_id, "model": self._pooling.model.name})[:-1]
            yield f',"usage":{json.dumps(usage(found))},"results":['
            for place, index in enumerate(ranked):
                entry: dict[str, object] = {"index": index, "relevance_score": scores[index]}
                if content.return_documents is not False:
                    entry["document"] = {"text": texts.documents[index]}
                yield f"{',' if place else ''}{json.dumps(entry, ensure_ascii=False)}"
            yield "]}"

        options = self._pooling.read_options(exchange, content, body)
        return PooledBody(asked.requests, asked.fields, options, write)


class _Asked:
    """Pairs of texts as prompts, one for each pair or one for each text, and back to scores."""

    def __init__(self, pooling: Pooling, content: TextPairFields, texts: Texts) -> None:
        """Raises InvalidRequest naming the field."""
        model, pooled = pooling.model, pooling.served(Task.SCORE)
        self._pooled, self._activates = pooled, content.use_activation
        self._count = len(texts.queries)
        self._reads_both = pooled.task is not Task.EMBED
        instructed = pooled.params.head == PoolingHead.POOLING_HEAD_TOKENS
        if content.instruction is not None and not instructed:
            raise unsupported("instruction", "has no place in this model's prompts: leave it out")
        of_documents = [f"{texts.document_field}[{i}]" for i in range(len(texts.documents))]
        if self._reads_both:
            queries = list(texts.queries)
            if self._count == 1:
                queries *= len(texts.documents)
            pairs = zip(queries, texts.documents, strict=True)
            if instructed:
                told = content.instruction
                prompts = [answering_prompt(query, text, told, model) for query, text in pairs]
            else:
                prompts = [joined(query, text) for query, text in pairs]
            self.fields: Sequence[str] = of_documents
        else:
            prompts = _apart(texts, pooled)
            of_queries = [f"{texts.query_field}[{i}]" for i in range(self._count)]
            self.fields = [*of_queries, *of_documents]
        self.requests = [read_pooled_prompt(content, one, model, pooled) for one in prompts]

    def scores(self, found: Sequence[PooledPrompt]) -> list[float]:
        """One for each pair: what the model says, or the cosine of the angle between two vectors."""
        if self._reads_both:
            return [self._pooled.score(one.vector, self._activates) for one in found]
        units = [_unit(one.vector) for one in found]
        queries, documents = units[: self._count], units[self._count :]
        if self._count == 1:
            queries = queries * len(documents)
        return [float(q @ d) for q, d in zip(queries, documents, strict=True)]


def _apart(texts: Texts, pooled: PooledModel) -> list[Prompt]:
    """Queries, then documents, each behind the text that the model's files put before it."""
    before_query, before_document = pooled.prompt_of(*_QUERY), pooled.prompt_of(*_DOCUMENT)
    prompts = [text_prompt(before_query + text) for text in texts.queries]
    return prompts + [text_prompt(before_document + text) for text in texts.documents]


def _unit(vector: np.ndarray[tuple[int], np.dtype[np.float32]]) -> np.ndarray:
    wide = vector.astype(np.float64)
    return wide / max(float(np.linalg.norm(wide)), 1e-12)


def _score_texts(content: ScoreRequest) -> Texts:
    """Raises InvalidRequest naming the field."""
    newer = content.queries is not None or content.documents is not None
    names = ("queries", "documents") if newer else ("text_1", "text_2")
    if newer and (content.text_1 is not None or content.text_2 is not None):
        raise wrong("text_1", "is the older name of queries: leave text_1 and text_2 out")
    queries, documents = (texts_of(getattr(content, name), name) for name in names)
    if len(queries) not in (1, len(documents)):
        raise wrong(
            names[0],
            f"must hold one text, or as many as {names[1]}: it holds {len(queries)}, {names[1]} {len(documents)}",
        )
    return Texts(queries, documents, *names)


def _rerank_texts(content: RerankRequest) -> Texts:
    """Raises InvalidRequest naming the field."""
    queries = texts_of(content.query, "query")
    if not content.documents:
        raise wrong("documents", "must be a list of at least one text")
    at_most("documents", len(content.documents), MOST_INPUTS)
    documents = [_document(one, f"documents[{i}]") for i, one in enumerate(content.documents)]
    return Texts(queries, documents, "query", "documents")


def _document(given: str | TextDocument, field: str) -> str:
    text = given.text if isinstance(given, TextDocument) else given
    if not text:
        raise wrong(field, "must be a text, or an object with one as `text`")
    return text
