"""The gateway under test, and stand-ins for the services that it calls."""
