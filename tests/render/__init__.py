"""Tests of what is drawn on the terminal."""
