"""What this machine computes with: processors, devices and their memory."""
