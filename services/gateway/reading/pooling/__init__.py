"""Prompts that become vectors or scores."""
