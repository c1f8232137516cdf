"""One connection of a client: TLS, the protocol with its limits, and its end."""
