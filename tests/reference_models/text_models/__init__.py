"""Text models of their own, and those that the image models in the folder above share."""
