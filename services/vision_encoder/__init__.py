"""Pixel values to embeddings, in batches across requests."""
