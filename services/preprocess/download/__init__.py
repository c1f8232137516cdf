"""Downloads of media over http(s), under a policy."""
