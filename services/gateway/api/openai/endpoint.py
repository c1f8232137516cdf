"""OpenAI's API with vLLM's additions."""

from collections.abc import Sequence

from services.gateway.admission.api_keys import BEARER, X_API_KEY
from services.gateway.api.error_object import error_reply
from services.gateway.api.openai.completions import Completions
from services.gateway.api.openai.message_replies import WRITERS
from services.gateway.api.openai.models import Models
from services.gateway.api.openai.pooled_schema import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from services.gateway.api.openai.replies import ID_PREFIXES
from services.gateway.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizeRequest,
)
from services.gateway.api.openai.scores import Scores
from services.gateway.api.openai.tokenize import Tokenizing
from services.gateway.api.openai.vectors import Vectors
from services.gateway.api.parts import Api, Parts
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError


class OpenAiEndpoint:
    """Chat, completions, vectors and scores, models, tokenizing."""

    roots = ("/v1",)
    key_headers = (BEARER,)

    def __init__(
        self,
        completions: Completions,
        vectors: Vectors,
        scores: Scores,
        models: Models,
        tokenizing: Tokenizing,
    ) -> None:
        tokenize, detokenize = tokenizing.tokenize, tokenizing.detokenize
        self.routes: Sequence[Route] = (
            Route("POST", "/v1/chat/completions", completions.chat, ChatRequest, generates=True),
            Route(
                "POST", "/v1/completions", completions.completion, CompletionRequest, generates=True
            ),
            *(
                Route("POST", path, handler, body, generates=True)
                for path, handler, body in (
                    ("/v1/embeddings", vectors.embeddings, EmbeddingRequest),
                    ("/pooling", vectors.pooled, PoolingRequest),
                    ("/classify", vectors.classes, ClassifyRequest),
                    ("/score", scores.score, ScoreRequest),
                    ("/v1/score", scores.score, ScoreRequest),
                    ("/rerank", scores.rerank, RerankRequest),
                    ("/v1/rerank", scores.rerank, RerankRequest),
                    ("/v2/rerank", scores.rerank, RerankRequest),
                )
            ),
            # Clients of Anthropic's API list models too.
            Route("GET", "/v1/models", models.all, reply=ModelList, key_headers=(X_API_KEY,)),
            Route("GET", "/v1/models/**", models.one, reply=ModelCard, key_headers=(X_API_KEY,)),
            Route("POST", "/tokenize", tokenize, TokenizeRequest, TokenizeReply),
            Route("POST", "/v1/tokenize", tokenize, TokenizeRequest, TokenizeReply),
            Route("POST", "/detokenize", detokenize, DetokenizeRequest, DetokenizeReply),
            Route("POST", "/v1/detokenize", detokenize, DetokenizeRequest, DetokenizeReply),
            Route("GET", "/tokenizer_info", tokenizing.tokenizer_info),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"error": {"message", "type", "param", "code"}}."""
        return error_reply(error)


def _endpoint(parts: Parts) -> OpenAiEndpoint:
    return OpenAiEndpoint(
        Completions(parts.generating),
        Vectors(parts.pooling),
        Scores(parts.pooling),
        Models(parts.model, parts.served_parts),
        Tokenizing(parts.model, parts.pool, parts.sent_files, parts.body_limits, parts.slices),
    )


OPENAI = Api(
    _endpoint, {kind: ReplyForm(WRITERS[kind], prefix) for kind, prefix in ID_PREFIXES.items()}
)
