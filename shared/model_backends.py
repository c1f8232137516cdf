"""Whose code runs a model's layers."""

from enum import StrEnum


class ModelBackend(StrEnum):
    """`--model-backend`."""

    AUTO = "auto"  # ours for the families that have a decoder here, that of transformers for all others
    NATIVE = "native"
    TRANSFORMERS = "transformers"
