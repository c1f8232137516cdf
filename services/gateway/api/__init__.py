"""The APIs that clients use, a folder each."""
