"""Batches of any API: gateways lead them, send their requests one by one, and write files of the results."""
