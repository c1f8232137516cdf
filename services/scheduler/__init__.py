"""Takes requests from the queue, plans the decoders' steps, writes the token log."""
