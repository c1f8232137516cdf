"""A running system, or the processes of one, as their clients and the machine see them."""
