"""Guesses of a sequence's next tokens, of what its tokens and others have been: they change speed alone."""
