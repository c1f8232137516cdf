"""`tessera run-batch`: a file of requests is answered into another file, and goes on where it was interrupted."""
