"""``python -m probprompt`` is the command line."""

from probprompt.cli import main

if __name__ == "__main__":
    main()
