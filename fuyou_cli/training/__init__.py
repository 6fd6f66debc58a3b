"""Trains (layer 6): goes from a recipe to a plan, runs the loop, keeps its state on disk and reports."""
