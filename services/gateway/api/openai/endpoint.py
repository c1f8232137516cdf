"""OpenAI's API with vLLM's additions."""

from collections.abc import Sequence

from services.gateway.api.endpoint import Route
from services.gateway.api.openai.completions import Completions
from services.gateway.api.openai.models import Models
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
from services.gateway.api.openai.tokenize import Tokenizing
from services.gateway.http.errors import error_body
from shared.errors import ServingError


class OpenAiEndpoint:
    """Chat, completions, models, tokenizing."""

    def __init__(self, completions: Completions, models: Models, tokenizing: Tokenizing) -> None:
        tokenize, detokenize = tokenizing.tokenize, tokenizing.detokenize
        self.routes: Sequence[Route] = (
            Route("POST", "/v1/chat/completions", completions.chat, ChatRequest, generates=True),
            Route(
                "POST", "/v1/completions", completions.completion, CompletionRequest, generates=True
            ),
            Route("GET", "/v1/models", models.all, reply=ModelList),
            Route("GET", "/v1/models/**", models.one, reply=ModelCard),
            Route("POST", "/tokenize", tokenize, TokenizeRequest, TokenizeReply),
            Route("POST", "/v1/tokenize", tokenize, TokenizeRequest, TokenizeReply),
            Route("POST", "/detokenize", detokenize, DetokenizeRequest, DetokenizeReply),
            Route("POST", "/v1/detokenize", detokenize, DetokenizeRequest, DetokenizeReply),
            Route("GET", "/tokenizer_info", tokenizing.tokenizer_info),
        )

    def error(self, error: ServingError) -> bytes:
        """{"error": {"message", "type", "param", "code"}}."""
        return error_body(error)
