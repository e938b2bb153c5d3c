"""The command line: ``fedloom run | list | partition | report``, each a few calls of the Python API."""

from fedloom.cli.main import main

__all__ = ["main"]
