"""Prompts to token ids, media to pixel values."""
