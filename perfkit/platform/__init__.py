"""A platform: devices, networks, fitted models, files of them, and what-if changes."""
