"""What every device of the encoder offers, and the operations of towers in plain torch."""
