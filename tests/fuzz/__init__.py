"""Inputs that nobody should send, to every door of a running system: each is refused clearly, and nothing else happens.

    PYTHONPATH=tests:protos python -m fuzz --seconds 120
    PYTHONPATH=tests:protos python -m fuzz --inputs 1000000 --seed 7
    PYTHONPATH=tests:protos python -m fuzz --replay rest:7:41523

An input is drawn from (door, seed, number) alone. A failure prints these, so that `--replay` sends it again.
"""
