"""Linear layers that checkpoints store as codes: the tensors of each layout, and what they are as `QuantizedWeight`."""
