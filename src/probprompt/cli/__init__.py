"""The command line."""

from probprompt.cli.app import main

__all__ = ["main"]
