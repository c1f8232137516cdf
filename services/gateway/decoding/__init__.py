"""From the bytes of a body to typed values: limits on what they may hold, and errors that name the field."""
