"""Scenes, and two renderers that draw them: one for training, one for evaluation only."""
