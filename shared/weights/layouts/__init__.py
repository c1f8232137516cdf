"""How checkpoints store linear layers as codes: which tensors a layer has, of which shapes and types. Without torch."""
