"""What the quickstart trains: a small text about islands that do not exist, and a model that has never seen it."""
