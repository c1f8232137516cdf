"""Blocks that decoders of several families are made of, and what the worker asks of a decoder."""
