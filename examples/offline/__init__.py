"""Programs that ask a model without a server."""
