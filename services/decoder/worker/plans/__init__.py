"""Step plans as arrays, and the block moves of one."""
