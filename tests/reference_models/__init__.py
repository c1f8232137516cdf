"""Reference implementations of model families that transformers lacks, in plain float32 torch."""
