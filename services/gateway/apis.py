"""The APIs that a gateway has."""

from collections.abc import Sequence

from services.gateway.api.anthropic.endpoint import ANTHROPIC
from services.gateway.api.batches.endpoint import BATCHES
from services.gateway.api.kserve.endpoint import KSERVE
from services.gateway.api.mindie.endpoint import MINDIE
from services.gateway.api.ollama.endpoint import OLLAMA
from services.gateway.api.openai.endpoint import OPENAI
from services.gateway.api.parts import Api
from services.gateway.api.responses.endpoint import RESPONSES
from services.gateway.api.tessera.endpoint import TESSERA
from services.gateway.api.tgi.endpoint import TGI
from services.gateway.api.vllm.endpoint import VLLM

# Errors about paths of none have the form of the first one.
APIS: Sequence[Api] = (
    OPENAI,
    TESSERA,
    TGI,
    VLLM,
    KSERVE,
    MINDIE,
    OLLAMA,
    RESPONSES,
    ANTHROPIC,
    BATCHES,
)
