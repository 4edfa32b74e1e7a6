"""Readers of what other people's tools have measured: text logs and databases become tidy frames."""
