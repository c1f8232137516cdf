"""POST /score and /rerank: how well texts answer queries."""

import json
from collections.abc import Iterator, Sequence

from services.gateway.admission.caller import Caller
from services.gateway.api.openai.pooled_replies import item, listed, usage
from services.gateway.api.openai.pooled_schema import RerankRequest, ScoreRequest, TextDocument
from services.gateway.api.pooling import PooledBody, PooledPrompt, Pooling
from services.gateway.decoding.bounds import at_most, whole, wrong
from services.gateway.decoding.decode import decode
from services.gateway.http.exchange import Exchange
from services.gateway.model.pooled_model import Task
from services.gateway.reading.pooling.pooled import MOST_INPUTS, texts_of
from services.gateway.reading.pooling.scored_texts import (
    ScoredTexts,
    TextPairFields,
    Texts,
    ranked,
    read_texts,
)

_SCORES, _RERANKS = "score-", "rerank-"
# Names of what is scored and by what, as vLLM has them.
_PAIRS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)


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
        asked = self._asked(content, _score_texts(content))

        def write(request_id: str, found: Sequence[PooledPrompt]) -> Iterator[str]:
            scores = asked.scores([one.vector for one in found])
            data = (item("score", index, score=one) for index, one in enumerate(scores))
            return listed(_SCORES, request_id, self._pooling.model.name, found, data)

        options = self._pooling.read_options(exchange, content, body)
        return PooledBody(asked.requests, asked.fields, options, write)

    def _read_rerank(self, exchange: Exchange, body: bytes) -> PooledBody:
        content = decode(body, RerankRequest)
        texts = _rerank_texts(content)
        top_n = whole("top_n", content.top_n, 0, 1 << 31) or None
        asked = self._asked(content, texts)

        def write(request_id: str, found: Sequence[PooledPrompt]) -> Iterator[str]:
            scores = asked.scores([one.vector for one in found])
            yield json.dumps({"id": _RERANKS + request_id, "model": self._pooling.model.name})[:-1]
            yield f',"usage":{json.dumps(usage(found))},"results":['
            for place, index in enumerate(ranked(scores, top_n)):
                entry: dict[str, object] = {"index": index, "relevance_score": scores[index]}
                if content.return_documents is not False:
                    entry["document"] = {"text": texts.documents[index]}
                yield f"{',' if place else ''}{json.dumps(entry, ensure_ascii=False)}"
            yield "]}"

        options = self._pooling.read_options(exchange, content, body)
        return PooledBody(asked.requests, asked.fields, options, write)

    def _asked(self, content: TextPairFields, texts: Texts) -> ScoredTexts:
        return ScoredTexts(content, texts, self._pooling.model, self._pooling.served(Task.SCORE))


def _score_texts(content: ScoreRequest) -> Texts:
    """Raises InvalidRequest naming the field."""
    names = dict.fromkeys(name for pair in _PAIRS for name in pair)
    given = [name for name in names if getattr(content, name) is not None]
    for queries, documents in _PAIRS:
        if {*given} <= {queries, documents}:
            return read_texts(
                getattr(content, queries), getattr(content, documents), queries, documents
            )
    pairs = ", ".join(f"{queries} and {documents}" for queries, documents in _PAIRS)
    raise wrong(given[-1], f"cannot be combined with {given[0]}: send one pair of {pairs}")


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
