"""The decoders of a scheduler: leases, step streams, and measurements of their speed."""
