"""Measurements: `make bench` lists them, `benchmarks/README.md` keeps the figures."""
