"""Processes that a service starts: that they end with it, what they answer, and whether one is busy or hung."""
