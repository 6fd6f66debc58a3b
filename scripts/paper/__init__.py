"""What `reproduce_paper.py` is made of: what is given, the paper's policy on it, fuyou's own plans beside it, and these without
the GPU tier."""
