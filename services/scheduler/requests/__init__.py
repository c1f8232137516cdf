"""The requests of a scheduler: which are taken, which decoder runs each, what is logged of them, and who owns them."""
