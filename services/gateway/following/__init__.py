"""From the token logs to pieces of text."""
