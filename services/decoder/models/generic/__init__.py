"""A decoder that runs the layers of a transformers class over our cache and our linear layers."""
