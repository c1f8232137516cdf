"""GGUF files, as llama.cpp has models: their headers, and what other files of a checkpoint are made of these."""
