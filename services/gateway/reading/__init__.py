"""From the bodies of requests to validated, typed requests."""
