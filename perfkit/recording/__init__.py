"""Graphs of any PyTorch training step, recorded without running it."""
