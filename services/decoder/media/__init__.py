"""Embeddings of media, and the spans of tokens that take them."""
