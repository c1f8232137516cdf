"""Confinement of processes that work on what nobody vouches for: files of clients, chat templates, grammars."""
