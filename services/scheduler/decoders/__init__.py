"""The decoders of a scheduler: leases, step streams, and what they tell of their speed."""
