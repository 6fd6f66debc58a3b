"""Tests what the quickstart makes before it trains."""
