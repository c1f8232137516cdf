"""The command `tessera`: all services on one machine, and the commands beside that."""
