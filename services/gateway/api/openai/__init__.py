"""OpenAI's API: requests, replies, events, errors."""
