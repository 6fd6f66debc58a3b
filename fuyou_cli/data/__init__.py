"""Turns the data named in a recipe into the padded batches of a run. The trainer's process needs only numpy for it."""
