"""Deployments over Flower: its SuperLink relays messages, with TLS and node keys; nodes are its SuperNodes.

The SuperLink runs beside the server, and nodes speak its Fleet protocol themselves: no process is started per message,
and no Flower app is installed or run anywhere, so that only settings and tensors are transmitted, never code.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from fedloom.base.errors import ConfigError

VERSIONS = ((1, 41), (1, 43))  # versions of flwr whose protocol this package speaks: from, below
LARGEST = 16 << 20  # bytes of a request and of an answer, each of which holds one object, and Flower's have 5 MiB
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
         "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}  # fmt: skip


def require() -> None:
    """Make Flower ready for use, without telemetry, update checks and installations at run time."""
    os.environ.update(QUIET)
    try:
        installed = version("flwr")
        import_module("flwr")
    except (PackageNotFoundError, ImportError) as error:
        raise ConfigError("a deployment needs the package flwr; pip install 'fedloom[flower]'.") from error
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        version_range = f"at least {VERSIONS[0][0]}.{VERSIONS[0][1]} and below {VERSIONS[1][0]}.{VERSIONS[1][1]}"
        raise ConfigError(
            f"flwr {installed} is installed, but a deployment needs {version_range}; install fedloom[flower]."
        )
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # this package reports errors itself
