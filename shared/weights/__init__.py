"""Tensors of a model by name, and linear layers on their way to a device: as stored, as codes, cut and stacked."""
