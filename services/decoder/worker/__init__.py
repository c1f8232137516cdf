"""Applies step plans: slots, input tensors, block moves, embeddings."""
