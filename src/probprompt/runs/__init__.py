"""Runs: every one a folder that records what was done, can be resumed, compared and checked."""
