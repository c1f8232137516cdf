"""Tests of the reference implementations, against the classes of transformers where there are some."""
