"""Prompts: chat templates, tokenization, placeholders."""
