"""What encoders of several families are made of: their interface, plain torch networks, towers on our own kernels."""
