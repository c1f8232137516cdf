"""What at least two services need."""
