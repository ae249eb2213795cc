"""What a run is worth: its accuracy matrix, and what can be read from it."""
