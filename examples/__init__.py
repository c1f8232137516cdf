"""Examples: how things that ship with Tessera were made."""
