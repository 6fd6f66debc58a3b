"""Quickstart: what it makes before it trains."""
