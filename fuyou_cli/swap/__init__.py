"""Wraps the native library (layer 3): arena, store and daemon. Only this package imports the extension."""
