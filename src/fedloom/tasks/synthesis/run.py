"""Run a method that generates data: look at what it makes while it trains, judge it at the end, and write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedloom.core.errors import CheckpointError
from fedloom.core.federation import Arrays
from fedloom.core.round import Server
from fedloom.core.settings import to_plain
from fedloom.data.sources.generated import Generated, parquet, save_npz
from fedloom.experiment.atomic import write_whole
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RoundStep, RunResult, run
from fedloom.experiment.runtime import environment, one_thread, pick_device
from fedloom.tasks.synthesis.grid import grid, value_range
from fedloom.tasks.synthesis.judge import CACHE, EvalConfig, EvalResult, SyntheticEvaluator
from fedloom.tasks.synthesis.take import extract_set, require_samples

FIGURES = "figures"
LAST, REAL = "synthetic.png", "real.png"
SHOWN = 10  # samples of a class in a picture


@dataclass(frozen=True)
class Synthesis:
    """What a federation has made.

    Attributes:
        result: the run, as of any method.
        found: the synthetic set, with its provenance.
        verdict: what the judge says of it.
    """

    result: RunResult
    found: Generated
    verdict: EvalResult


class EvalObserver(Callback):
    """Looks at the synthetic set every so many rounds: a picture, and numbers for the round's record.

    Args:
        experiment: the run.
        judge: who judges.
        out: the run directory, for pictures; None draws none.
    """

    def __init__(self, experiment: Experiment, judge: SyntheticEvaluator, out: Path | None) -> None:
        self.experiment, self.judge, self.out = experiment, judge, out
        self.last: tuple[int, Generated, EvalResult] | None = None

    def on_step(self, step: RoundStep) -> dict[str, Any]:
        """Give the numbers of this round, if it is one to look at; in the last round everything is measured."""
        server = step.server
        every, final = self.judge.judging.every, server.round == self.experiment.rounds
        if not final and (not every or server.round % every):
            return {}
        found, verdict = self.evaluate(server, thorough=final)
        if final:
            self.last = server.round, found, verdict
        return verdict.numbers

    @cached_property
    def network(self) -> nn.Module:
        """A network of the experiment's kind, whatever its parameters; always laid out alike, so that bits are."""
        with torch.random.fork_rng(devices=[]):
            return self.experiment.model()

    def evaluate(self, server: Server, *, thorough: bool) -> tuple[Generated, EvalResult]:
        """The set as it stands, drawn and judged."""
        real = self.experiment.federation.train.arrays
        arrays = extract_set(server, self.network, real, self.judge.judging.per_class, self.experiment.seed)
        if self.out is not None:
            name = f"{self.experiment.method.name}, round {server.round}"
            picture(arrays, self.out / FIGURES / f"synthetic-{server.round:06d}.png", name)
        verdict = self.judge.judge(arrays, thorough=thorough)
        return Generated(arrays, provenance(self.experiment, server.round)), verdict


def synthesize(
    experiment: Experiment,
    out: Path | str | None = None,
    judging: EvalConfig | None = None,
    *,
    cache: Path | None = None,
    resume: bool | Path = False,
    checkpoint_every: int = 10,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
) -> Synthesis:
    """Run a generating method, and judge and write what it has made.

    Besides what every run leaves, the run directory gets ``synthetic.npz``, ``synthetic.parquet``, ``synthetic.json``
    (everything the judge found), ``figures/synthetic-<round>.png`` for every look, ``figures/synthetic.png`` and
    ``figures/real.png``. Records of rounds that were looked at have ``synthetic/...``.

    Args:
        experiment: FedEvg, FedCGAN, FedCVAE, or another method with a synthetic set at the server or a generator.
        out: run directory; None keeps everything in memory.
        judging: when and how the set is judged.
        cache: a folder for the real-data classifier, where several runs share one; by default ``judge`` in ``out``.
        resume: as in ``fedloom.experiment.federated.run``, and the rest likewise.
        checkpoint_every: rounds between checkpoints.
        keep: how many stay.
        callbacks: what looks at the run.

    Raises:
        ConfigError: for a method that generates nothing, besides what ``run`` refuses.
        CheckpointError: as ``run``, or if the results cannot be written.

    Example:
        >>> from fedloom import methods
        >>> from fedloom.core.local import Local
        >>> from fedloom.data import federate
        >>> from fedloom.models import models
        >>> from fedloom.experiment.experiment import Evaluation
        >>> experiment = Experiment(
        ...     methods.fedevg(per_class=2), federate("digits", "iid", clients=2),
        ...     lambda: models.make("energy_cnn", classes=10, inputs=(1, 8, 8), channels=(8, 16)),
        ...     rounds=2, local=Local(steps=2, batch_size=20, lr=0.01), evaluation=Evaluation(what=()))
        >>> made = synthesize(experiment, judging=EvalConfig(max_steps=50))
        >>> made.found.arrays.x.shape, made.found.provenance["method"]
        (torch.Size([20, 1, 8, 8]), 'fedevg')
        >>> 0 <= made.verdict.numbers["synthetic/accuracy"] <= 1
        True
    """
    require_samples(experiment.method)
    out = None if out is None else Path(out)
    judging = judging or EvalConfig()
    if cache is None and out is not None:
        cache = out / CACHE
    with one_thread():
        judge = SyntheticEvaluator(
            experiment.federation, judging, experiment.seed, cache, pick_device(experiment.device)
        )
        observer = EvalObserver(experiment, judge, out)
        result = run(
            replace(experiment, config={**experiment.config, "judge": to_plain(asdict(judging))}),
            out,
            resume=resume,
            checkpoint_every=checkpoint_every,
            keep=keep,
            callbacks=[observer, *callbacks],
        )
        return _finish(observer, result, out)


def _finish(observer: EvalObserver, result: RunResult, out: Path | None) -> Synthesis:
    server = result.snapshot.server
    if observer.last is not None and observer.last[0] == server.round:
        _, found, verdict = observer.last
    else:  # the run had ended before, or stopped early
        found, verdict = observer.evaluate(server, thorough=True)
    if out is not None:
        try:
            write(found, verdict, observer.judge, out)
        except OSError as error:
            raise CheckpointError(
                f"the synthetic set cannot be written to {out} ({error.strerror or error}); "
                f"make room and continue with resume={out}."
            ) from error
    return Synthesis(result, found, verdict)


def write(found: Generated, verdict: EvalResult, judge: SyntheticEvaluator, out: Path) -> None:
    """The set in both formats, what the judge found, and its picture beside one of real samples."""
    save_npz(found, out / "synthetic.npz")
    write_whole(out / "synthetic.parquet", parquet(found))
    about = {"provenance": found.provenance, "numbers": verdict.numbers, **verdict.said}
    write_whole(out / "synthetic.json", (json.dumps(about, indent=1) + "\n").encode())
    name, rounds = found.provenance["method"], found.provenance["rounds"]
    picture(found.arrays, out / FIGURES / LAST, f"{name}, round {rounds}")
    picture(judge.test, out / FIGURES / REAL, "real test images")


def picture(arrays: Arrays, path: Path, title: str) -> None:
    """Images, one row a class, in their range; nothing for inputs that are no images."""
    if arrays.x.ndim == 4 and arrays.x.shape[1] in (1, 3):
        low, high = value_range(arrays)
        grid(arrays.x, arrays.y, path, low=low, high=high, classes=arrays.classes, names=arrays.names, title=title,
             each=SHOWN)  # fmt: skip


def provenance(experiment: Experiment, rounds: int) -> dict[str, Any]:
    """Where a set comes from: method, data, partition, seed, rounds, versions and revision, range."""
    said: Mapping[str, Any] = experiment.federation.provenance
    config, arrays = experiment.config, experiment.federation.train.arrays
    about = ("licence", "citation")
    source = dict(config["data"]) if "data" in config else dict(said.get("source", {}))
    made = environment()
    return {
        "method": experiment.method.name,
        "settings": config.get("method") or {place: repr(part) for place, part in experiment.method.parts.items()},
        "rounds": rounds,
        "seed": experiment.seed,
        "data": {key: value for key, value in source.items() if key not in about},
        "licence": said.get("source", {}).get("licence", "not stated"),
        "partition": said.get("partition", {}),
        "clients": len(experiment.federation),
        "range": {"low": 0.0, "high": 1.0, "mean": list(arrays.mean), "std": list(arrays.std)},
        "versions": made["versions"],
        "revision": made["git"],
    }
