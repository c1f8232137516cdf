"""Inputs that nobody should send, to every door of a running system: each is refused clearly, and nothing else happens.

    PYTHONPATH=.:protos python -m tests.fuzz --seconds 120
    PYTHONPATH=.:protos python -m tests.fuzz --inputs 1000000 --seed 7
    PYTHONPATH=.:protos python -m tests.fuzz --replay rest:7:41523

An input is drawn from (door, seed, number) alone. A failure prints these, so that `--replay` sends it again.
"""
