"""Logs, diagnostics and the profile of ops."""
