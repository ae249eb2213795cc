"""Recorded runs, the paper's tables and their cost: ``python -m reproduction``.

Part of a checkout, not of the installed package; nothing under ``src/`` imports it.
"""
