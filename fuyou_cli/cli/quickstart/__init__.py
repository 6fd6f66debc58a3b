"""`fuyou quickstart`: a toy model and a text about islands that do not exist, then the public commands, then one screen."""
