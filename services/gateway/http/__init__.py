"""HTTP: the ASGI application, its server, and what holds for every exchange."""
