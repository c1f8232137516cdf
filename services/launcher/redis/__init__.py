"""The Redis of a system on one machine: the server program, its process, and checks of any other Redis."""
