"""Folders: state, sockets, artifacts, and the model."""
