"""Preprocess services with a real Redis and real checkpoints."""

from tests.support.preprocess.fixtures import (
    clip_folder,
    clip_service,
    llama_folder,
    llama_service,
    make_preprocess,
    siglip_folder,
)

__all__ = [
    "clip_folder",
    "clip_service",
    "llama_folder",
    "llama_service",
    "make_preprocess",
    "siglip_folder",
]
