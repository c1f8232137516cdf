"""The processes of the simulated world, and what connects them."""
