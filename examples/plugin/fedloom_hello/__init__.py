"""A command of its own: its record, which imports nothing heavy, so that `fedloom help` stays fast."""

from fedloom.applications import Application

HELP = """Print how far apart a finished run's clients are.

usage: fedloom gap run=DIR

example:
  fedloom gap run=runs/2026-01-31/093000-fedavg-0
"""

application = Application(
    "gap", "print how far apart a finished run's clients are", HELP, "fedloom_hello.command:command"
)
