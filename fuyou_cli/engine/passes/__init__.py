"""Tells what a visit computes, by the kind of its stage: `block` (norms and projections as well), `embedding`, `head`."""
