"""Learning, one task at a time."""
