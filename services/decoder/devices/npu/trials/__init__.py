"""Which forms of an operator give right numbers here: each is tried in a process of its own, on inputs that show
errors."""
