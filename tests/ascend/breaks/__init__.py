"""Ways to break the code for NPUs, one at a time, and the tests that notice each: `python -m tests.ascend.breaks`."""
