"""Image workers: confined child processes that decode what strangers send."""
