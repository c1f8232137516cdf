"""Embeddings that a step takes, and spans of tokens that it computes whole."""
