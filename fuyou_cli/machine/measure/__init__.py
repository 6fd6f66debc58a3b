"""Measures the rates that a plan is made with."""
