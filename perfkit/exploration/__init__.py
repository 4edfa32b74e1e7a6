"""Many configurations at once: sweeps, scaling over ranks, and what has to change to reach a
target."""
