"""Holds pure functions from spec to plan, schedule and timeline (layer 2). Imports no torch."""
