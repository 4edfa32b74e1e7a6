"""Reports: any results as one file that opens without a network."""
