"""The scheduler and the queue: intake, ownership, recovery, deadlines."""
