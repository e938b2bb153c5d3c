"""FedLoom beside other frameworks: the same clients, mini-batches, models and learning rates, everyone taking turns.

    python benchmarks/peers [--envs DIR] [--only WORKLOAD …] [--peers bare fedloom fedloom:1 pfl pfl:1 …]
                            [--repeats 5] [--rounds N] [--out benchmarks/results/peers.json]

Workloads are rows of ``workload.SETTINGS``:

W1: TwoNN, 1000 clients of 60 samples, cohort 100, batch 10, 1 epoch.   W3: the same with cohort 10 and 5 epochs.
CNN: the FedDyn CNN, 100 clients of 500 images (3x32x32), cohort 10, batch 50, 1 epoch.
fedprox, scaffold, ditto, fedper: W1 by these methods, in every framework that has them; ``bare`` remains FedAvg.
pfl: pfl-research's benchmark on CIFAR-10, 1000 IID clients of 50 images, cohort 50, batch 10, 10 rounds.
flute: FLUTE's logistic regression on MNIST, 1000 clients, 10 a round, batch 10, 100 rounds. Clients have 60 images
    each, mostly of two classes, where FLUTE's have 69 in the mean, of a power law.
femnist: FLUTE's CNN and its 10 clients a round with batches of 20, on 240 clients with 200 letters of EMNIST (26
    classes) instead of FEMNIST (62), some rounds of its 1500.
shakespeare: 10 roles a round with batches of 4, 20 sequences of 80 characters each, an LSTM of two layers
    of 256; some rounds of FLUTE's 1200.
blazefl: BlazeFL's on CIFAR-10, 100 clients of 500 images, all in every round, 5 epochs, batch 50, 5 rounds, a small
    CNN.

Each framework is installed from PyPI into an environment of its own under ``--envs`` (once), and runs there in a
process of its own with the method as it provides it; ``pfl:1`` and ``fedloom:1`` are told to use one process. All get
the same data, first model, cohorts and order of samples, and do one round when their turn comes, alone on the machine.
``bare`` is plain PyTorch on two processes (``bare.py``). Seconds are the median over rounds without the first one,
which warms up, and ``all_rounds`` what all would take at their mean. A ratio compares two rounds of one turn (above 1:
faster than ``bare``) and is the median over turns, with its quartiles. Where the data are real, the accuracy on all
test samples after the last round stands beside; nobody's clock runs while models are evaluated, by the same code for
all. ``limit`` is what the machine's cores would take for the matrix products and the memory traffic of the steps alone
(``../limits.py``).

All must train the same model. They are started again with one mini-batch a client and without dropout, and after one
round the distance to the bare model must be less than ``TOLERANCE`` of the distance that this has moved (of what is
shared, for methods with private layers; their first step is FedAvg's). After many steps in single precision any two of
them are far apart, because rounding grows with every step; ``rounding.py`` shows how, and that in double precision it
does not happen. Several runs may write into one file: what is new of a workload replaces what is there; ``--part``
runs the check or the timing alone, or ``memory``: the largest memory that a contestant and its processes hold during
the rounds beyond PyTorch alone (``../memory.py``; libraries are left out), samples included, of which each process has
its own copy unless a framework shares them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from select import select
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from environments import PEERS, prepare, versions
from workload import DEFAULTS, SETTINGS, Workload, read, write

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from limits import limits  # noqa: E402
from memory import memory  # noqa: E402
from record import machine  # noqa: E402

FEWEST = 3  # rounds of which quartiles can be taken, with the first, which is left out
LONGEST, SHORTEST = 900.0, 60.0  # seconds for an answer, at most and at least, the start of a process included
LOOK = 0.02  # seconds between two looks at memory
TOLERANCE = 1e-3  # in single precision, where a unit may be switched on in one order of summation and off in another
METHODS: dict[str, tuple[str, ...]] = {  # of each framework, among the methods of the workloads
    "bare": ("fedavg", "fedprox", "scaffold", "ditto", "fedper"),  # by FedAvg
    "fedloom": ("fedavg", "fedprox", "scaffold", "ditto", "fedper"),
    "pfl": ("fedavg", "fedprox", "scaffold"),
    "flower": ("fedavg",),
    "fedlab": ("fedavg", "fedprox", "scaffold", "ditto"),
    "fedjax": ("fedavg",),
    "fluke": ("fedavg", "fedprox", "scaffold", "ditto", "fedper"),
    "flgo": ("fedavg", "fedprox", "scaffold", "ditto"),
}
ON_SO_MANY = ("bare:1", "fedloom:1", "pfl:1", "pfl:5")


class Contestant:
    """A process that does one round when told to.

    Args:
        name: of the framework, with ``:1`` behind it for one process.
        python: the interpreter of its environment.
        folder: where the workload lies, and where the process leaves its log and its last model.
        device: where it trains; on a GPU on one process unless its name says more.
        patience: seconds for an answer, after which it counts as failed.
    """

    def __init__(self, name: str, python: Path, folder: Path, device: str = "cpu", patience: float = LONGEST) -> None:
        self.name, self.folder, self.patience = name, folder, patience
        self.log = folder / f"{name}.log"
        peer, _, processes = name.partition(":")
        paths = [str(HERE), str(HERE.parents[1] / "src")] if peer == "fedloom" else [str(HERE)]
        before = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DEVICE": device}
        env |= {
            "PROCESSES": processes or ("2" if device == "cpu" else "1"),
            "PYTHONPATH": os.pathsep.join(paths + before),
        }
        script = HERE / ("bare.py" if peer == "bare" else f"with_{peer}.py")
        self.process = subprocess.Popen(
            [python, script, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
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
        with np.load(path) as arrays:
            return [arrays[key] for key in arrays.files]

    def close(self) -> None:
        """End the process, if it has not ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what a process that has ended was still to be told
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
            ready, _, _ = select([self.process.stdout], [], [], self.patience)
            if not ready:
                self.process.kill()
                raise RuntimeError(f"no answer within {self.patience:.0f} s")
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            log = self.log.read_text()
            errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", log, re.MULTILINE) or log.strip().splitlines()
            raise RuntimeError(errors[-1] if errors else "it ended without a word")
        return answer


def timed(
    name: str, pythons: dict[str, Path], rounds: int, device: str = "cpu", until: float = inf, real: bool = True
) -> dict[str, Any]:
    """Seconds, ratios and accuracies of all contestants at one workload, and the limit.

    No round begins once the clock ``time.monotonic`` shows ``until``, but for the first ``FEWEST``.
    """
    seconds: dict[str, list[float]] = {peer: [] for peer in pythons}
    accuracies: dict[str, float] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, name, rounds, real=real)
        work = read(folder)
        patience = min(LONGEST, max(SHORTEST, until - time.monotonic()))
        running = {peer: Contestant(peer, python, folder, device, patience) for peer, python in pythons.items()}
        try:
            for finished in range(rounds):
                if finished >= FEWEST and time.monotonic() > until:
                    rounds = finished
                    break
                for peer in [peer for peer in running if peer not in failed]:
                    try:
                        seconds[peer].append(running[peer].round())
                    except RuntimeError as error:
                        failed[peer] = str(error)
            if len(work.y_test):
                trained = [peer for peer in running if peer not in failed]
                accuracies = {peer: accuracy(work, running[peer].weights()) for peer in trained}
        finally:
            for contestant in running.values():
                contestant.close()
    cell: dict[str, Any] = {"failed": failed, "rounds": rounds, "limit": limit(work) if device == "cpu" else None}
    for peer in [peer for peer in pythons if peer not in failed]:
        turns = [b / s for b, s in zip(seconds["bare"][1:], seconds[peer][1:], strict=True)]
        low, middle, high = statistics.quantiles(turns, n=4)
        cell[peer] = {
            "seconds": round(statistics.median(seconds[peer][1:]), 4),
            "all_rounds": round(statistics.fmean(seconds[peer][1:]) * rounds, 2),
            "times_bare": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
        } | ({"accuracy": round(accuracies[peer], 4)} if peer in accuracies else {})
    return cell


def remembered(name: str, pythons: dict[str, Path], rounds: int) -> dict[str, Any]:
    """The largest memory of each contestant during the rounds, alone on the machine, beyond that of PyTorch alone."""
    idle = [sys.executable, "-c", "import torch; print(flush=True); input()"]
    with subprocess.Popen(idle, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as torch_alone:
        assert torch_alone.stdout is not None
        torch_alone.stdout.readline()
        floor = memory(torch_alone.pid)
        torch_alone.communicate("\n")
    cell: dict[str, Any] = {"torch_alone_mb": round(floor), "failed": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, name, rounds)
        work = read(folder)
        cell["samples_mb"] = round((work.x.nbytes + work.y.nbytes + work.x_test.nbytes + work.y_test.nbytes) / 1e6)
        for peer, python in pythons.items():
            contestant, peak, over = Contestant(peer, python, folder), [0.0], Event()

            def look(process: int = contestant.process.pid, peak: list[float] = peak, over: Event = over) -> None:
                while not over.wait(LOOK):
                    peak[0] = max(peak[0], memory(process))

            looking = Thread(target=look)
            looking.start()
            try:
                for _ in range(rounds):
                    contestant.round()
                cell[peer] = {"memory_mb": round(peak[0] - floor)}
            except RuntimeError as error:
                cell["failed"][peer] = str(error)
            finally:
                over.set()
                looking.join()
                contestant.close()
    return cell


def accuracy(work: Workload, weights: list[np.ndarray]) -> float:
    """Accuracy of a model on all test samples."""
    model = work.module(weights).eval()
    x, y = torch.from_numpy(work.x_test), torch.from_numpy(work.y_test)
    with torch.no_grad():
        hits = [int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True)]
    return sum(hits) / len(y)


def limit(work: Workload) -> float | None:
    """Seconds a round that matrix products or memory traffic alone take on all cores; None of recurrent layers."""
    if work.settings["model"] == "lstm":
        return None
    step = limits(work.module(), work.x.shape[1:], work.batch)
    steps = work.cohorts.shape[1] * work.order.shape[2] / work.batch / machine()["cores"]
    return float(f"{steps * max(step.flops / step.flops_per_second, step.bytes / step.bytes_per_second):.3g}")


def model_differences(name: str, pythons: dict[str, Path]) -> dict[str, Any]:
    """Distances to the bare model, relative to how far it has moved, after a round of one mini-batch a client."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, models = Path(temporary), {}
        write(folder, name, 1, steps=1)
        start, failed = read(folder).model, {}
        for peer, python in pythons.items():
            contestant = Contestant(peer, python, folder)
            try:
                contestant.round()
                models[peer] = contestant.weights()
            except RuntimeError as error:
                failed[peer] = str(error)
            finally:
                contestant.close()
    last = min(map(len, models.values()))  # what all share
    way = distance(start[:last], models["bare"][:last])
    differences = {peer: distance(model[:last], models["bare"][:last]) / way for peer, model in models.items()}
    return {"failed": failed} | {
        peer: {"difference": float(f"{difference:.2g}"), "same_model": difference < TOLERANCE}
        for peer, difference in differences.items()
    }


def distance(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """The Euclidean distance of two models."""
    return float(np.sqrt(sum(np.square(a.astype(np.float64) - b).sum() for a, b in zip(first, second, strict=True))))


def table(results: dict[str, Any]) -> str:
    """Seconds a round, how many times faster than ``bare`` that is, and accuracies, as a Markdown table."""
    lines = ["| | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    names = [
        name
        for workload in results.values()
        for name, cell in workload.items()
        if isinstance(cell, dict) and "seconds" in cell
    ]
    for peer in dict.fromkeys(["limit", *names]):
        cells = []
        for workload in results.values():
            cell = workload.get(peer)
            if peer == "limit":
                cells.append(f"{cell:.2g} s, {workload['bare']['seconds'] / cell:.2g}" if cell else "-")
            elif cell is None:
                cells.append("fails" if peer in workload["failed"] else "-")
            else:
                reached = f", {cell['accuracy']:.1%}" if "accuracy" in cell else ""
                note = {True: "", False: ", another model"}.get(cell.get("same_model"), ", not checked")
                cells.append(f"{cell['seconds']:.2g} s, {cell['times_bare']:.2f}{reached}{note}")
        lines.append(f"| {peer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Prepare the environments, run everything and print a table; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedloom" / "peers"
    everyone = [*METHODS, "blazefl"]
    parser.add_argument("--envs", type=Path, default=cache, help=f"folder of the environments (default {cache})")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--peers", nargs="+", choices=[*everyone, *ON_SO_MANY], default=everyone)
    parser.add_argument("--repeats", type=int, default=5, help="rounds where the workload does not say, and one before")
    parser.add_argument("--rounds", type=int, help="of every workload, at least 3; otherwise its own number")
    parser.add_argument("--part", nargs="+", choices=["check", "time", "memory"], default=["check", "time"])
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pythons: dict[str, Path] = {"bare": Path(sys.executable)}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(args.peers):
        peer = name.partition(":")[0]
        if peer not in PEERS:
            pythons[name] = Path(sys.executable)
        elif (prepared := prepare(peer, args.envs))[0] is not None:
            pythons[name] = prepared[0]
        else:
            missing[peer] = prepared[1]
    for peer, reason in missing.items():
        print(f"{peer} is left out: {reason}", file=sys.stderr)
    if args.install_only:
        return
    torch.set_num_threads(1)
    old = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    record: dict[str, Any] = {
        "versions": old.get("versions", {})
        | {peer: versions(peer, python) for peer, python in pythons.items() if peer in PEERS},
        "left_out": {peer: why for peer, why in old.get("left_out", {}).items() if peer not in pythons} | missing,
        "workloads": old.get("workloads", {}),
    }
    for name in args.only:
        method = SETTINGS[name].get("method", DEFAULTS["method"])
        able = {peer: python for peer, python in pythons.items() if method in METHODS[peer.partition(":")[0]]}
        workload = record["workloads"].setdefault(name, {})
        parts = [model_differences(name, able)] if "check" in args.part else []
        if "time" in args.part:
            rounds = args.rounds or SETTINGS[name].get("rounds", args.repeats + 1)
            workload |= {
                "command": f"python benchmarks/peers --only {name} --peers {' '.join(able)} --rounds {rounds}",
                "date": datetime.now(timezone.utc).date().isoformat(),
                "machine": machine(),
            }
            parts.append(timed(name, able, rounds))
        if "memory" in args.part:
            rounds = args.rounds or args.repeats
            words = f"--only {name} --peers {' '.join(able)} --rounds {rounds} --part memory"
            workload |= {"memory_command": f"python benchmarks/peers {words}", "memory_date": machine()["date"]}
            parts.append(remembered(name, able, rounds))
            print(*(f"{peer}: {parts[-1].get(peer, 'fails')}" for peer in able), sep="\n", flush=True)
        for key, value in [item for part in parts for item in part.items()]:
            workload[key] = workload.get(key, {}) | value if isinstance(value, dict) else value
        if args.out:
            args.out.write_text(json.dumps(record, indent=1) + "\n")
        for peer, reason in workload["failed"].items():
            print(f"{peer} fails: {reason}")
        if "time" in args.part:
            print(table({name: workload}), flush=True)


if __name__ == "__main__":
    main()
