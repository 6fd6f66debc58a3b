"""Layer 3: arena, store and daemon; the only package that sees the native extension."""
