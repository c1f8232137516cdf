"""Ollama's API under /api: chat, generate, and what is served."""
