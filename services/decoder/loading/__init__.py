"""From a checkpoint folder to a worker that has made its first steps."""
