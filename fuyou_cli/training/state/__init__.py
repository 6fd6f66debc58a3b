"""Keeps a run on disk: store, manifest, commits, resuming."""
