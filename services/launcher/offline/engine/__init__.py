"""The services of an engine: `tessera serve` in a process of its own, which ends with the program."""
