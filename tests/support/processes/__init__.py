"""Whole systems and single programs in processes of their own."""
