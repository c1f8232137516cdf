"""FastLLM's `.flm`: its header, vocabulary and tensors, and the folder of a checkpoint that is made of it."""
