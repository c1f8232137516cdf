"""Preprocess as a running service, and what its tests ask it and check of its pixels."""
