"""Applies step plans: input tensors, the choice of tokens, results."""
