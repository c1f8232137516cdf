"""The Redis of a system on one machine: a binary, its process, and checks of any other Redis."""
