"""The operations of vision towers, for each device."""
