"""Checkpoint folders: finding, checking and reading them."""
