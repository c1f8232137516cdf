"""What a step of the model is made of, as models and devices see it: tokens, attention, state, keys of media, what is
not split."""
