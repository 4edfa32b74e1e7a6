"""Measurements to a platform, and predictions against measurements."""
