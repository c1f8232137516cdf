"""Right bodies, by API."""
