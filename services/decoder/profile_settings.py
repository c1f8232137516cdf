"""Settings of `tessera profile`."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from shared.settings import DEMO_MODEL, ComputeSettings, FamilySettings


class ProfileCommandSettings(ComputeSettings, FamilySettings):
    """Which ops a prompt and the tokens after it are made of."""

    model: CliPositionalArg[Path] = Field(
        DEMO_MODEL, description="Hugging Face checkpoint folder; the demo model unless given."
    )
    threads: int = Field(
        0, ge=0, description="Threads that compute; one for each core unless given."
    )
    sequences: int = Field(1, ge=1, description="Sequences that are computed together.")
    prompt: int = Field(256, ge=1, description="Tokens of each prompt.")
    steps: int = Field(32, ge=1, description="Tokens that are generated after it.")
