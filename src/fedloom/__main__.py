"""``python -m fedloom`` is the command ``fedloom``."""

import sys

from fedloom.cli import main

if __name__ == "__main__":
    sys.exit(main())
