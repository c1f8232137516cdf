"""What config.json says of a model, and whether it can be served: read without torch, before anything is loaded."""
