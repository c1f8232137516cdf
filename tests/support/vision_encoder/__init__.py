"""What tests of the vision encoder share."""
