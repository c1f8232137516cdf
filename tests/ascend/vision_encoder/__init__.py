"""Tests of the vision encoder on the simulated NPU."""
