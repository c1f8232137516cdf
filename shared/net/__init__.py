"""Between processes: gRPC, Redis connections, the registry, health, and supervised tasks."""
