"""Requests to the services, and their answers as they grow."""
