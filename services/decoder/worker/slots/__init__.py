"""What a worker keeps of each sequence, by the number of its slot."""
