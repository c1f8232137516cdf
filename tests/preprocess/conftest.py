"""Preprocess services with a real Redis and real checkpoints."""

from tests.support.preprocess_fixtures import (
    clip_folder,
    llama_folder,
    make_preprocess,
    siglip_folder,
)

__all__ = ["clip_folder", "llama_folder", "make_preprocess", "siglip_folder"]
