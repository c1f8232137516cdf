"""What the server says of its own routes: a description for machines, and a page for people."""
