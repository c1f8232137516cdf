"""Media of requests: as clients send them, taken out of large bodies, and how they are processed."""
