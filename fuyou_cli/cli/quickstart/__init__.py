"""Hold `fuyou quickstart`: a toy model, a text about islands that do not exist, the public commands, and one screen."""
