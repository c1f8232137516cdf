"""Deterministic simulation of the whole system under faults."""
