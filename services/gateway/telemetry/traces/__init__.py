"""Timelines of requests, in words and as traces of OpenTelemetry."""
