"""Runs: recorded, resumable, single or in grids."""
