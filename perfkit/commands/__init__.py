"""The command line: one file per command, thin over the functions of the library."""
