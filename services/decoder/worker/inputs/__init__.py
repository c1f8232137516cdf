"""From rows that run to the tensors of a step."""
