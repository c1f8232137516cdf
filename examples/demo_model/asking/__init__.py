"""The kinds of questions, a few to a file; `questions.py` puts them together."""
