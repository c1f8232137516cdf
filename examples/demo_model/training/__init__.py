"""A training run: batches, supervision of the tower, the optimiser, and a second process for gradients."""
