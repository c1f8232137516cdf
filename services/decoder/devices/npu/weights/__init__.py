"""Weights as NPUs multiply them: codes, tiles, and the experts of a layer."""
