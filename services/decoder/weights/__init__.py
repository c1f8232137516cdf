"""Linear layers on their way from a checkpoint to a device: as they are stored, as codes, cut and stacked."""
