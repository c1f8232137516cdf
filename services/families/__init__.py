"""The model families that can be served, a folder for each."""
