"""Readers of files that other tools write: logs, traces, databases and sets of tables become tidy
frames."""
