"""From a validated request to an accepted one."""
