"""`tessera bench`: load on an OpenAI-compatible server, Tessera or another, and what a client saw of it."""
