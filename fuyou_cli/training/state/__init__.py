"""What of a run is kept on disk: store, manifest, commits, resuming."""
