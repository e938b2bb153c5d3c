"""Runs that decide open claims, many at once on one GPU, for a number of minutes.

    FEDLOOM_DATA=... python recipes/gpu.py --minutes 15 [--at-once 8] [--claims recipes/claims] [--runs runs/claims]
    FEDLOOM_DATA=... python recipes/gpu.py --minutes 600 --device cpu --at-once 1
    python recipes/gpu.py --dry-run                           # print the order and the estimates alone

Whenever a place is free, the next run is one of the claims with the largest (importance × chance to decide) / minutes,
seed by seed, so that pairs are complete early. Minutes are those that claim files estimate, until rounds of a run have
been measured here. Every minute the runs that have ended are added to the results beside the claims, and the curves of
all are written to ``partial.json`` in the folder of runs. When time is up, runs are interrupted and leave a checkpoint;
the next call continues them. Runs are stored without being replayed: ``fedloom claim check`` does that.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from reporting import reports_errors, write

from fedloom.base.errors import CheckpointError
from fedloom.experiment.rundir import RunDirectory
from fedloom_apps.claims.command import machine
from fedloom_apps.claims.register import ClaimFile, fit, merged, of_run, open_work, read_claims, store

POLL, GRACE = 1.0, 60.0
"""Seconds between two looks at the runs, and those that an interrupted run has for its checkpoint."""


class Job(NamedTuple):
    """One run that would bring a claim nearer to a verdict."""

    file: ClaimFile
    run: str
    seed: int

    @property
    def place(self) -> str:
        """Its folder, relative to the folder of all runs."""
        return f"{self.file.name}/{self.run.replace(' ', '_')}/{self.seed}"


@dataclass
class Card:
    """The runs in progress on one device, and what is known of all."""

    files: Sequence[ClaimFile]
    runs: Path
    device: str
    at_once: int
    results: dict[str, dict[str, Any]]
    running: dict[Job, Any] = field(default_factory=dict)
    failed: set[Job] = field(default_factory=set)

    def order(self) -> Iterator[Job]:
        """Jobs that are neither running nor failed, the most promising first."""
        for open_file in open_work(self.files, self.results, self.rates()):
            jobs = [Job(open_file.file, work.run, seed) for work in open_file.works for seed in work.seeds]
            yield from (j for j in sorted(jobs, key=lambda j: j.seed) if not {j} & (self.running.keys() | self.failed))

    def rates(self) -> dict[tuple[str, str], float]:
        """Minutes for one seed of each run, by its file and its name, where rounds of it were measured here."""
        minutes: dict[tuple[str, str], float] = {}
        for file in self.files:
            for run, settings in file.complete.items():
                for path in (self.runs / Job(file, run, 0).place).parent.glob("*/metrics.jsonl"):
                    seconds = [record["seconds"] for record in RunDirectory(path.parent).metrics()]
                    if len(seconds) > 1:  # the first one compiles and allocates
                        mean = sum(seconds[1:]) / (len(seconds) - 1)
                        minutes[file.name, run] = mean * settings["rounds"] / 60
        return minutes

    def fill(self) -> None:
        """Start runs until all places are taken."""
        order = self.order()
        while len(self.running) < self.at_once and (job := next(order, None)):
            self.running[job] = start(self.words(job), self.runs / f"{job.place}.log")
            print(f"start {job.place}", flush=True)

    def words(self, job: Job) -> list[str]:
        """What ``fedloom run`` is called with: a run that was begun is continued."""
        out = self.runs / job.place
        where = [f"device={self.device}", "checkpoint.every=25"]
        if RunDirectory(out).is_begun:
            return [f"resume={out}", *where]
        return [*job.file.words(job.run), f"seed={job.seed}", f"out={out}", *where]

    def collect(self) -> None:
        """Take note of runs that have ended."""
        for job, process in list(self.running.items()):
            if (code := process.poll()) is None:
                continue
            del self.running[job]
            directory = RunDirectory(self.runs / job.place)
            try:
                if code or not directory.status.ended:
                    raise CheckpointError(f"see {self.runs / job.place}.log.")
                at = fit(directory, [job.file])
                record = of_run(directory, at.file.metrics)
            except CheckpointError as error:
                self.failed.add(job)
                print(f"failed: {job.place}: {error}", flush=True)
                continue
            name = at.file.name
            added = merged(self.results[name], at.run, at.seed, record) | {"machine": machine(directory)}
            self.results[name] = store(at.file, added)
            print(f"ended {job.place} after {record['rounds']} rounds", flush=True)

    def partial(self) -> None:
        """Write the curves so far of the runs in progress."""
        curves = {}
        for job in self.running:
            history = RunDirectory(self.runs / job.place).metrics()
            values = {name: [record.get(name) for record in history] for name in job.file.metrics}
            curves[job.place] = {"rounds": len(history), "curves": values}
        write(self.runs / "partial.json", json.dumps(curves))

    def stop(self) -> None:
        """Interrupt what is running; each leaves a checkpoint."""
        for process in self.running.values():
            process.send_signal(signal.SIGINT)
        for process in self.running.values():
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()


def start(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A run in a process of its own, whose output goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fedloom", "run", "-q", *words]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def work(card: Card, minutes: float, every: float = 60.0) -> None:
    """Keep the device busy until time is up or nothing is open."""
    end, last_record = time.monotonic() + 60 * minutes, time.monotonic()
    try:
        while time.monotonic() < end:
            card.collect()
            card.fill()
            if not card.running:
                return
            if time.monotonic() - last_record >= every:
                card.partial()
                last_record = time.monotonic()
            time.sleep(POLL)
    finally:
        card.partial()
        card.stop()


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is open."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="how long to go on")
    parser.add_argument("--at-once", type=int, default=8, help="runs at a time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--claims", type=Path, default=Path(__file__).parent / "claims")
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"))
    parser.add_argument("--dry-run", action="store_true", help="print the order alone")
    args = parser.parse_args(arguments)
    files = read_claims(args.claims)
    card = Card(files, args.runs, args.device, args.at_once, {file.name: file.results() for file in files})
    if args.dry_run:
        for open_file in open_work(files, card.results, card.rates()):
            print(f"{open_file.score:8.4f}  {open_file.file.name}: {open_file.minutes:.0f} minutes")
        return 0
    work(card, args.minutes)
    return int(bool(card.failed))


if __name__ == "__main__":
    sys.exit(main())
