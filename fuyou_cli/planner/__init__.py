"""Layer 2: pure functions from spec to plan, schedule and timeline. Imports no torch."""
