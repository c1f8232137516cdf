"""Texts that are scored: as prompts, one for each pair or one for each text, and from their vectors back to scores."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from services.gateway.decoding.about import about
from services.gateway.decoding.bounds import wrong
from services.gateway.model.pooled_model import Floats, PooledModel, Task
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.fields.unsupported import unsupported
from services.gateway.reading.generation import Prompt, text_prompt
from services.gateway.reading.pooling.pooled import (
    PooledFields,
    joined,
    read_pooled_prompt,
    texts_of,
)
from services.gateway.reading.pooling.rerank_prompt import answering_prompt
from tessera.common.v1.pooling_pb2 import PoolingHead

# Names that sentence-transformers gives to the texts before documents.
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
_SHORTEST = 1e-12  # length that a vector is divided by


class TextPairFields(PooledFields, kw_only=True):
    """What a query and texts are scored by."""

    instruction: Annotated[
        str | None,
        about(
            'with `--task score`: what a model that answers "yes" or "no" is told to look for',
            "a search on the web",
        ),
    ] = None
    use_activation: Annotated[
        bool | None, about("false: logits in place of probabilities", "as the model's files say")
    ] = None


class Texts(NamedTuple):
    """Queries and texts, pair by pair where there are several queries, and where a request has them."""

    queries: Sequence[str]
    documents: Sequence[str]
    query_field: str
    document_field: str


class ScoredTexts:
    """Their prompts as `requests`, where a request has each of them as `fields`, and their scores."""

    def __init__(
        self, asked: TextPairFields, texts: Texts, model: ServedModel, pooled: PooledModel
    ) -> None:
        """Raises InvalidRequest naming the field."""
        self._pooled, self._activates = pooled, asked.use_activation
        self._count = len(texts.queries)
        self._reads_both = pooled.task is not Task.EMBED
        instructed = pooled.params.head == PoolingHead.POOLING_HEAD_TOKENS
        if asked.instruction is not None and not instructed:
            raise unsupported("instruction", "has no place in this model's prompts: leave it out")
        of_documents = [f"{texts.document_field}[{i}]" for i in range(len(texts.documents))]
        if self._reads_both:
            queries = list(texts.queries)
            if self._count == 1:
                queries *= len(texts.documents)
            pairs = zip(queries, texts.documents, strict=True)
            if instructed:
                told = asked.instruction
                prompts = [answering_prompt(query, text, told, model) for query, text in pairs]
            else:
                prompts = [joined(query, text) for query, text in pairs]
            self.fields: Sequence[str] = of_documents
        else:
            prompts = _apart(texts, pooled)
            of_queries = [f"{texts.query_field}[{i}]" for i in range(self._count)]
            self.fields = [*of_queries, *of_documents]
        self.requests = [read_pooled_prompt(asked, one, model, pooled) for one in prompts]

    def scores(self, vectors: Sequence[Floats]) -> list[float]:
        """One for each pair: what the model says, or the cosine of the angle between two vectors."""
        if self._reads_both:
            return [self._pooled.score(vector, self._activates) for vector in vectors]
        units = [_unit(vector) for vector in vectors]
        queries, documents = units[: self._count], units[self._count :]
        if self._count == 1:
            queries = queries * len(documents)
        return [float(q @ d) for q, d in zip(queries, documents, strict=True)]


def read_texts(
    queries: str | Sequence[str] | None, documents: str | Sequence[str] | None, *names: str
) -> Texts:
    """One query and several texts, or as many queries as texts; `names`: of both fields. Raises InvalidRequest."""
    of_queries, of_documents = names
    found = texts_of(queries, of_queries), texts_of(documents, of_documents)
    if len(found[0]) not in (1, len(found[1])):
        raise wrong(
            of_queries,
            f"must hold one text, or as many as {of_documents}: it holds {len(found[0])}, {of_documents}"
            f" {len(found[1])}",
        )
    return Texts(*found, of_queries, of_documents)


def ranked(scores: Sequence[float], top_n: int | None) -> Sequence[int]:
    """The places of the best scores; of equal ones the first comes first. None is all."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]


def _apart(texts: Texts, pooled: PooledModel) -> list[Prompt]:
    """Queries, then documents, each behind the text that the model's files put before it."""
    before_query, before_document = pooled.prompt_of(*_QUERY), pooled.prompt_of(*_DOCUMENT)
    prompts = [text_prompt(before_query + text) for text in texts.queries]
    return prompts + [text_prompt(before_document + text) for text in texts.documents]


def _unit(vector: Floats) -> npt.NDArray[np.float64]:
    wide = vector.astype(np.float64)
    unit: npt.NDArray[np.float64] = wide / max(float(np.linalg.norm(wide)), _SHORTEST)
    return unit
