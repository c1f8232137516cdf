"""The small model that `make serve` starts, and everything that made it."""
