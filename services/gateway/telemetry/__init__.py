"""Metrics, and the log line at the end of a request."""
