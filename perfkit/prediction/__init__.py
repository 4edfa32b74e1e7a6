"""From a graph and a platform to the time of one iteration."""
