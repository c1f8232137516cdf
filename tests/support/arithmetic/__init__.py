"""A language model made of arithmetic, a decoder that computes it, and its transports: direct calls and gRPC."""
