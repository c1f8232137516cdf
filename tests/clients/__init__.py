"""Real clients, each in an environment of its own, against running services.

`programs/` has a program for each, which asks in every way that its client has and prints what it was given; those of
Python are run by the environment's own interpreter, those of node in its folder. `environments.py` makes the
environments, below `build/clients`, once for each set of requirements.
"""
