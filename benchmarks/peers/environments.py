"""An environment of its own for each framework, installed from PyPI."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

TORCH = f"torch=={version('torch').partition('+')[0]}"  # the same arithmetic for everybody
PEERS: dict[str, list[str]] = {
    "pfl": ["pfl", TORCH],
    "flower": ["flwr[simulation]", TORCH],
    "fedlab": ["fedlab", TORCH],
    "fedjax": ["fedjax", "jax==0.4.25", "jaxlib==0.4.25", "dm-haiku<0.0.13", "numpy<2", "scipy<1.13"],  # of its time
    "blazefl": ["blazefl", TORCH],
    "fluke": ["fluke-fl", TORCH],
    "flgo": ["flgo", "cvxopt", TORCH],
}


def prepare(peer: str, folder: Path) -> tuple[Path | None, str]:
    """The interpreter of a framework's environment, created if it is missing; or None, and the reason."""
    place = folder / peer
    python, marker = place / "bin" / "python", place / "installed"
    if peer == "blazefl" and sys.version_info < (3, 14):
        return None, f"blazefl 3 asks for Python 3.14, and this is {sys.version_info.major}.{sys.version_info.minor}"
    if peer == "blazefl":
        return None, "there is no script for it yet that was tried"
    if marker.exists():
        return python, ""
    place.mkdir(parents=True, exist_ok=True)
    uv = shutil.which("uv")
    if uv:
        commands = [[uv, "venv", "--python", sys.executable, place], [uv, "pip", "install", "--python", python]]
    else:
        commands = [[sys.executable, "-m", "venv", place], [python, "-m", "pip", "install", "--quiet"]]
    print(f"installing {peer} into {place}", file=sys.stderr)
    try:
        subprocess.run(commands[0], check=True, capture_output=True, text=True)
        subprocess.run([*commands[1], *PEERS[peer]], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        lines = re.findall(r"^ERROR: (.*)$", error.stderr, re.MULTILINE) or error.stderr.strip().splitlines()
        return None, f"it does not install: {lines[-1] if lines else 'no reason was given'}"
    marker.touch()
    return python, ""


def versions(peer: str, python: Path) -> dict[str, str]:
    """The installed versions of the requested packages."""
    names = [re.split(r"[\[=<]", requirement)[0] for requirement in PEERS[peer]]
    code = "import sys, importlib.metadata as m; print(*(m.version(n) for n in sys.argv[1:]))"
    process = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True)
    return dict(zip(names, process.stdout.split(), strict=True))
