"""`tessera doctor`: what this machine has, what is missing, and what installs or corrects it."""
