"""Tools and what a chat says of calls: which there are, which were made, and how an answer with some is divided."""
