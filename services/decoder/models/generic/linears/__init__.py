"""Linear layers of a transformers class, packed by our operations; which part of them a rank has."""
