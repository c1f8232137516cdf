"""Redis: its address, connections to it, and which run of it answers."""
