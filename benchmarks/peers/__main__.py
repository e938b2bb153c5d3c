"""FedLoom beside other frameworks: the same clients, mini-batches, models and learning rates, everyone taking turns.

    python benchmarks/peers [--envs DIR] [--only W1 W3 CNN] [--peers bare fedloom pfl flower fedlab fedjax]
                            [--repeats 5] [--out benchmarks/results/peers.json]

W1: TwoNN, 1000 clients of 60 samples, cohort 100, batch 10, 1 epoch.   W3: the same with cohort 10 and 5 epochs.
CNN: the FedDyn CNN, 100 clients of 500 images (3x32x32), cohort 10, batch 50, 1 epoch.

Each framework is installed from PyPI into an environment of its own under ``--envs`` (once), and runs there in a
process of its own with FedAvg as it provides it. All get the same random data, first model, cohorts and order
of samples, and does one round when its turn comes, alone on the machine; the first round warms up and does not count.
``bare`` is plain PyTorch on two processes (``bare.py``). A ratio compares two rounds of one turn (above 1: faster than
``bare``) and is the median over turns, with its quartiles.

All must train the same model. They are started again with one mini-batch a client, and after one round the distance to
the bare model must be less than ``TOLERANCE`` of the distance that this has moved. After many steps in single
precision any
two of them are far apart, because rounding grows with every step; ``rounding.py`` shows how, and that in double
precision it does not happen.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environments import PEERS, prepare, versions
from workload import SETTINGS, write

HERE = Path(__file__).parent
TOLERANCE = 1e-3  # in single precision, where a unit may be switched on in one order of summation and off in another
SCRIPTS = {
    "bare": "bare.py", "fedloom": "with_fedloom.py", "pfl": "with_pfl.py", "flower": "with_flower.py",
    "fedlab": "with_fedlab.py", "fedjax": "with_fedjax.py",
}  # fmt: skip


class Contestant:
    """A process that does one round when told to.

    Args:
        name: of the framework.
        python: the interpreter of its environment.
        folder: where the workload lies, and where the process leaves its log and its last model.
    """

    def __init__(self, name: str, python: Path, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.log = folder / f"{name}.log"
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        if name == "fedloom":
            env["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src")])
        self.process = subprocess.Popen(
            [python, HERE / SCRIPTS[name], folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log.open("w"), text=True, env=env,
        )  # fmt: skip

    def round(self) -> float:
        """The seconds of one round."""
        return float(self._ask("go"))

    def weights(self) -> list[np.ndarray]:
        """The model after all rounds; ends the process."""
        path = self.folder / f"{self.name}.npz"
        self._ask(f"end {path}")
        self.close()
        with np.load(path) as held:
            return [held[key] for key in held.files]

    def close(self) -> None:
        """End the process, if it has not ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _ask(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(what, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            log = self.log.read_text()
            told = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", log, re.MULTILINE) or log.strip().splitlines()
            raise RuntimeError(told[-1] if told else "it ended without a word")
        return answer


def compare(name: str, pythons: dict[str, Path], repeats: int) -> dict[str, Any]:
    """Seconds, ratios and differences of all contestants at one setting."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, name, repeats + 1)
        running = {peer: Contestant(peer, python, folder) for peer, python in pythons.items()}
        seconds: dict[str, list[float]] = {peer: [] for peer in running}
        failed: dict[str, str] = {}
        try:
            for _ in range(repeats + 1):
                for peer in [peer for peer in running if peer not in failed]:
                    try:
                        seconds[peer].append(running[peer].round())
                    except RuntimeError as error:
                        failed[peer] = str(error)
        finally:
            for contestant in running.values():
                contestant.close()
    differences = first_steps(name, {peer: python for peer, python in pythons.items() if peer not in failed})
    found: dict[str, Any] = {"failed": failed}
    for peer, difference in differences.items():
        turns = [b / s for b, s in zip(seconds["bare"][1:], seconds[peer][1:], strict=True)]
        low, middle, high = statistics.quantiles(turns, n=4)
        found[peer] = {
            "seconds": round(statistics.median(seconds[peer][1:]), 4),
            "times_bare": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "difference": float(f"{difference:.2g}"),
            "same_model": difference < TOLERANCE,
        }
    return found


def first_steps(name: str, pythons: dict[str, Path]) -> dict[str, float]:
    """Distances to the bare model, relative to how far it has moved, after a round of one mini-batch a client."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, models = Path(temporary), {}
        write(folder, name, 1, steps=1)
        for peer, python in pythons.items():
            contestant = Contestant(peer, python, folder)
            try:
                contestant.round()
                models[peer] = contestant.weights()
            finally:
                contestant.close()
        with np.load(folder / "model.npz") as held:
            start = [held[key] for key in held.files]
    way = distance(start, models["bare"])
    return {peer: distance(model, models["bare"]) / way for peer, model in models.items()}


def distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The Euclidean distance of two models."""
    return float(np.sqrt(sum(np.square(a.astype(np.float64) - b).sum() for a, b in zip(one, other, strict=True))))


def table(results: dict[str, Any]) -> str:
    """The ratios as a Markdown table."""
    lines = ["| | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for peer in SCRIPTS:
        cells = []
        for found in results.values():
            one = found.get(peer)
            if one is None:
                cells.append("failed" if peer in found["failed"] else "-")
            else:
                low, high = one["quartiles"]
                cells.append(
                    f"{one['times_bare']:.2f} ({low:.2f} to {high:.2f})"
                    + ("" if one["same_model"] else ", another model")
                )
        if any(cell != "-" for cell in cells):
            lines.append(f"| {peer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Prepare the environments, run everything and print a table; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedloom" / "peers"
    parser.add_argument("--envs", type=Path, default=cache, help=f"folder of the environments (default {cache})")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--peers", nargs="+", choices=[*SCRIPTS, "blazefl"], default=[*SCRIPTS, "blazefl"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pythons, missing = {"bare": Path(sys.executable)}, {}
    for peer in dict.fromkeys(args.peers):
        if peer in PEERS:
            python, reason = prepare(peer, args.envs)
            if python is None:
                missing[peer] = reason
            else:
                pythons[peer] = python
        else:
            pythons[peer] = Path(sys.executable)
    for peer, reason in missing.items():
        print(f"{peer} is left out: {reason}", file=sys.stderr)
    if args.install_only:
        return
    torch.set_num_threads(1)
    results = {name: compare(name, pythons, args.repeats) for name in args.only}
    found = {
        "command": f"python benchmarks/peers --repeats {args.repeats}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "torch": torch.__version__},
        "versions": {peer: versions(peer, python) for peer, python in pythons.items() if peer in PEERS},
        "left_out": missing,
        "settings": results,
    }
    print(table(results))
    for name, one in results.items():
        for peer, reason in one["failed"].items():
            print(f"{peer} failed at {name}: {reason}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
