"""What prompts are made of, for all services that read them: kinds of media, roles, data URLs, lengths."""
