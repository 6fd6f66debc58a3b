"""Computes visits, by the kind of their stage: `block` (also norms and projections), `embedding`, `head`."""
