"""Checkpoint folders with random weights and real shapes: serving them takes as long as serving real ones."""
