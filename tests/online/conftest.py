"""The command line, called in this process in an empty folder."""

from helpers.commands import cli

__all__ = ["cli"]
