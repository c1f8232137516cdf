"""A queue with short calls, readers of its channels, and a Redis that loses writes."""
