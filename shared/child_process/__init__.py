"""Processes that a service starts: that they end with it, and whether one that does not answer is busy or hung."""
