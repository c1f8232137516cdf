"""Answers held to a form: each spelling of it becomes one grammar."""
