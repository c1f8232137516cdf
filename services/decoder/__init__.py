"""Runs step plans: paged KV cache, language model, sampler."""
