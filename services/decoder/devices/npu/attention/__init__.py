"""Keys and values of a layer as NPUs have them, and attention to them."""
