"""Tests of the decoder on the simulated NPU."""
