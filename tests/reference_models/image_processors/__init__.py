"""Image processors of the reference models: tiles, crops and sizes of an image, and its pixels."""
