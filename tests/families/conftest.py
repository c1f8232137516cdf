"""Preprocess services for families whose prompts need one."""

from tests.support.preprocess.fixtures import make_preprocess

__all__ = ["make_preprocess"]
