"""Text and tokens: tokenizer files, and the fold from tokens to text."""
