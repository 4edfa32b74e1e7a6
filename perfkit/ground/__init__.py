"""Units, files and hardware: what every other room uses."""
