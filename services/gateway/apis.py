"""The APIs that a gateway has."""

from collections.abc import Sequence

from services.gateway.api.ollama.endpoint import OLLAMA
from services.gateway.api.openai.endpoint import OPENAI
from services.gateway.api.parts import Api
from services.gateway.api.tessera.endpoint import TESSERA

# Errors about paths of none have the form of the first one.
APIS: Sequence[Api] = (OPENAI, TESSERA, OLLAMA)
