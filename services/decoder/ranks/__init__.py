"""What one of several ranks has of every layer, and the calls by which ranks compute together."""
