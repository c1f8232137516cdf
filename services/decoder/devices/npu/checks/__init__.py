"""What `tessera doctor --npu` runs, beside the trials: operations, whole steps, and several cards."""
