"""A Redis in virtual time that runs the shipped scripts."""
