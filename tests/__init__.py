"""Tests of everything, and what they share."""
