"""`fedloom gap`: a command is a function of the parsed words and options that returns an exit code."""

import argparse

import fedloom as fl
from fedloom.base.errors import ConfigError


def command(arguments: argparse.Namespace) -> int:
    """Print the difference between the best and the worst client's accuracy."""
    if len(arguments.words) != 1 or not arguments.words[0].startswith("run="):
        raise ConfigError("fedloom gap takes the directory of a finished run, run=DIR.")
    final = fl.load(arguments.words[0].removeprefix("run=")).summary["final"]
    print(f"{final['clients/accuracy/best10'] - final['clients/accuracy/worst10']:.3f}")
    return 0
