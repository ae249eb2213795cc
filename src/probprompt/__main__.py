"""Command line: ``python -m probprompt``."""

from probprompt.cli import main

if __name__ == "__main__":
    main()
