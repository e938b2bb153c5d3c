"""The command line, ``fedloom COMMAND``."""

from fedloom.cli.main import main

__all__ = ["main"]
