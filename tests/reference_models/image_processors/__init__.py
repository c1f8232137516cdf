"""Image processors of reference models whose images are cut into tiles or sized in their own way."""
