"""What `fuyou quickstart` does: a toy model, a text about invented islands, and the public commands."""
