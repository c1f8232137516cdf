"""The whole system as its clients meet it."""
