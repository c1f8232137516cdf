"""`tessera run`: pictures in files to answers in a file, in batches."""
