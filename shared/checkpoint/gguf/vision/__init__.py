"""The vision part of a model in a GGUF file of its own (mmproj), beside its language model."""
