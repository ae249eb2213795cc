"""The project's own results pages: recorded runs, the paper's tables, and what they cost (``python -m reproduction``).

Part of a checkout, not of the installed package; nothing under ``src/`` imports it.
"""
