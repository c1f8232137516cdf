"""Tokenizers in other files than `tokenizer.json`, as the content that such a file would have."""
