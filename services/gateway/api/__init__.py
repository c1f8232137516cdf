"""The APIs that clients speak, a folder each."""
