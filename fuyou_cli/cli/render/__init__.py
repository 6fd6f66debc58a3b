"""Draws what the user sees. Every function takes the Rich console to print on and is otherwise pure."""
