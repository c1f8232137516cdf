"""Programs that tests on the simulated NPU start as processes of their own."""
