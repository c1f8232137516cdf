"""Processor time that the scheduler takes for each step and sequence."""
