"""Every op in plain torch, and what the ops of all devices share."""
