"""Message batches: many requests in one body, each of which gets one result."""
