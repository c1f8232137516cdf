"""Not a service: a program that compares what Tessera makes of a checkpoint with what its own class makes of it.

Prompt, encoder and decoder are each in a service of their own; here they are together, with the class, in a small
random model that has the checkpoint's configuration. `python -m services.comparison` runs beside a decoder's start and
for `tessera check` (`services/families/comparison.py`).
"""
