"""What requests have generated: choices, records of the token log, and its writer."""
