"""Timing on real hardware: kernels, collectives, whole training iterations and the operations
inside them."""
