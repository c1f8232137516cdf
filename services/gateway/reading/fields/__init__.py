"""Single fields: their names in an API, and which are refused."""
