"""What the quickstart trains: a small text about an archipelago that does not exist, and a model that has never seen it."""
