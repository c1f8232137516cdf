"""The CPU: towers on our own kernels, or in plain torch where these cannot be had."""
