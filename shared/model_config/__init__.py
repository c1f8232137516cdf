"""What config.json says of a model, read without torch, before anything is loaded."""
