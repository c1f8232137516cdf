"""From the bodies of requests to our own types."""
