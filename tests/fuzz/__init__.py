"""Malformed and hostile inputs to every API and socket of a running system: each is refused clearly, and
nothing else happens.

    PYTHONPATH=.:protos python -m tests.fuzz --seconds 120
    PYTHONPATH=.:protos python -m tests.fuzz --inputs 1000000 --seed 7
    PYTHONPATH=.:protos python -m tests.fuzz --replay rest:7:41523

An input is drawn from (target, seed, number) alone. A failure prints these, so that `--replay` sends it again.
"""
