"""The mark at which a text is cut before it is tokenized."""

# Put inside a control token that a user wrote: the token's two halves stay plain text. Put between two texts that are
# tokenized apart. A private-use character: no tokenizer or template gives it a meaning.
GUARD = "\U000f5a1d"
