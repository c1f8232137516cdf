"""Image workers: confined child processes that decode untrusted files."""
