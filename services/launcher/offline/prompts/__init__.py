"""What programs ask: prompts, media and adapters as bodies of requests."""
