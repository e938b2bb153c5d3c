"""Runs of generating methods: evaluate the synthetic set during and after training, and write it, with figures."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedloom.base.errors import CheckpointError, ConfigError, first_line
from fedloom.base.settings import to_plain
from fedloom.core.federation import Arrays
from fedloom.data.sources.generated import Generated, parquet, pixels, save_npz
from fedloom.experiment.atomic import write_whole
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RoundStep, RunResult, run
from fedloom.experiment.runtime import environment, pick_device, reproducible
from fedloom.metrics.distribution import alike
from fedloom.rounds.server import Server
from fedloom_apps.synthesis.judge import CACHE, EvalConfig, EvalResult, SyntheticEvaluator
from fedloom_apps.synthesis.synthetic_set import extract_set, require_samples

FIGURES = "figures"
LAST, REAL = "synthetic.png", "real.png"
PICTURE_SAMPLES = 10  # samples of a class in a picture


@dataclass(frozen=True)
class Synthesis:
    """The result of a synthesis run.

    Attributes:
        result: the result of the federated run.
        generated: the synthetic set with its provenance.
        evaluation: the evaluation of the set.
    """

    result: RunResult
    generated: Generated
    evaluation: EvalResult


class EvalObserver(Callback):
    """Evaluates the synthetic set at intervals: a figure, and numbers for the round's record."""

    def __init__(self, experiment: Experiment, judge: SyntheticEvaluator, out: Path | None) -> None:
        self.experiment, self.judge, self.out = experiment, judge, out
        self.last: tuple[int, Generated, EvalResult] | None = None

    def on_step(self, step: RoundStep) -> dict[str, Any]:
        """The numbers of this round if it is to be evaluated; the last round is evaluated thoroughly."""
        server = step.server
        every, final = self.judge.settings.every, server.round == self.experiment.rounds
        if not final and (not every or server.round % every):
            return {}
        generated, evaluation = self.evaluate(server, thorough=final)
        if final:
            self.last = server.round, generated, evaluation
        return evaluation.numbers

    def on_finish(self, summary: Mapping[str, Any]) -> None:
        """Write the set of the last round, before trackers collect the files."""
        if self.last is not None and self.last[0] == summary["rounds"]:
            self.write(*self.last[1:])

    def write(self, generated: Generated, evaluation: EvalResult) -> None:
        """Write the set in both formats, its evaluation, and figures into the run directory, if there is one."""
        if (out := self.out) is None:
            return
        about = {"provenance": generated.provenance, "numbers": evaluation.numbers, **evaluation.details}
        try:
            save_npz(generated, out / "synthetic.npz")
            write_whole(out / "synthetic.parquet", parquet(generated))
            write_whole(out / "synthetic.json", (json.dumps(about, indent=1) + "\n").encode())
            name, rounds = generated.provenance["method"], generated.provenance["rounds"]
            picture(generated.arrays, out / FIGURES / LAST, f"{name}, round {rounds}")
            picture(self.judge.test, out / FIGURES / REAL, "real test images")
        except OSError as error:
            raise CheckpointError(
                f"the synthetic set cannot be written to {out} ({error.strerror or error}); make room and continue "
                f"with resume={out}."
            ) from error

    @cached_property
    def network(self) -> nn.Module:
        """A network of the experiment's architecture, for sampling with the server's parameters."""
        with torch.random.fork_rng(devices=[]):
            return self.experiment.model()

    def evaluate(self, server: Server, *, thorough: bool) -> tuple[Generated, EvalResult]:
        """Extract and evaluate the current set."""
        real = self.experiment.federation.train.arrays
        arrays = extract_set(server, self.network, real, self.judge.settings.per_class, self.experiment.seed)
        if self.out is not None:
            name = f"{self.experiment.method.name}, round {server.round}"
            picture(arrays, self.out / FIGURES / f"synthetic-{server.round:06d}.png", name)
        evaluation = self.judge.evaluate(arrays, thorough=thorough)
        return Generated(arrays, provenance(self.experiment, server.round)), evaluation


def synthesize(
    experiment: Experiment,
    out: Path | str | None = None,
    judge: EvalConfig | None = None,
    *,
    cache: Path | None = None,
    resume: bool | Path | str = False,
    checkpoint_every: int = 10,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
) -> Synthesis:
    """Run a generating method; evaluate and write its synthetic set.

    Besides the usual files, the run directory contains ``synthetic.npz``, ``synthetic.parquet``, ``synthetic.json``
    (the evaluation), ``figures/synthetic-<round>.png`` for every evaluated round, ``figures/synthetic.png`` and
    ``figures/real.png``. Records of evaluated rounds have keys ``synthetic/...``.

    Args:
        experiment: FedEvg, FedCGAN, FedCVAE, or another method with a synthetic set at the server or a generator.
        out: run directory; None keeps everything in memory.
        judge: settings of the evaluation.
        cache: folder of the real-data classifier, if several runs share it; by default ``judge`` in ``out``.
        resume: as in ``fedloom.experiment.federated.run``, like all following settings.
        checkpoint_every: rounds between checkpoints.
        keep: number of checkpoints to keep.
        callbacks: observers of the run.

    Raises:
        ConfigError: for a method that generates no samples, in addition to those of ``run``.
        DataError: if images are not in 0..1, normalised or not, in which samples are generated.
        CheckpointError: as ``run``, or if the results cannot be written.

    Example:
        >>> from fedloom import methods
        >>> from fedloom.core.local import Local
        >>> from fedloom.data import federate
        >>> from fedloom.models import models
        >>> from fedloom.experiment.evaluation import Evaluation
        >>> experiment = Experiment(
        ...     methods.fedevg(per_class=2), federate("digits", "iid", clients=2),
        ...     lambda: models.make("energy_cnn", classes=10, inputs=(1, 8, 8), channels=(8, 16)),
        ...     rounds=2, local=Local(steps=2, batch_size=20, lr=0.01), evaluation=Evaluation(what=()))
        >>> synthesis = synthesize(experiment, judge=EvalConfig(max_steps=50))
        >>> synthesis.generated.arrays.x.shape, synthesis.generated.provenance["method"]
        (torch.Size([20, 1, 8, 8]), 'fedevg')
        >>> 0 <= synthesis.evaluation.numbers["synthetic/accuracy"] <= 1
        True
    """
    require_samples(experiment.method)
    out = None if out is None else Path(out)
    judge = judge or EvalConfig()
    if cache is None and out is not None:
        cache = out / CACHE
    with reproducible():
        evaluator = SyntheticEvaluator(
            experiment.federation, judge, experiment.seed, cache, pick_device(experiment.device)
        )
        if (real := pixels(evaluator.test)).ndim == 4:  # refuse unsuitable data before the first round
            alike(real, torch.stack([torch.zeros_like(real[0]), torch.ones_like(real[0])]))
        observer = EvalObserver(experiment, evaluator, out)
        result = run(
            replace(experiment, config={**experiment.config, "judge": to_plain(asdict(judge))}),
            out,
            resume=resume,
            checkpoint_every=checkpoint_every,
            keep=keep,
            callbacks=[observer, *callbacks],
        )
        server = result.snapshot.server
        if observer.last is not None and observer.last[0] == server.round:
            _, generated, evaluation = observer.last
        else:  # the run had ended before, or stopped early
            generated, evaluation = observer.evaluate(server, thorough=True)
            observer.write(generated, evaluation)
        return Synthesis(result, generated, evaluation)


def picture(arrays: Arrays, path: Path, title: str) -> None:
    """Draw images, one row per class; does nothing for inputs that are not images.

    If the file cannot be written, a warning says so.
    """
    if arrays.x.ndim != 4 or arrays.x.shape[1] not in (1, 3):
        return
    try:
        from fedloom.data.plots import plot_samples  # matplotlib is slow to import, and an extra

        path.parent.mkdir(parents=True, exist_ok=True)
        plot_samples(replace(arrays, x=arrays.x.float().cpu(), y=arrays.y.cpu()), title, path, PICTURE_SAMPLES)
    except (OSError, ConfigError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        warnings.warn(
            f"the figure {path} cannot be written ({reason}); the run goes on without it.",
            stacklevel=2,
        )


def provenance(experiment: Experiment, rounds: int) -> dict[str, Any]:
    """The provenance of a set: method, data, partition, seed, rounds, versions, revision and value range."""
    origin: Mapping[str, Any] = experiment.federation.provenance
    config, arrays = experiment.config, experiment.federation.train.arrays
    description_keys = ("licence", "citation")
    source = dict(config["data"]) if "data" in config else dict(origin.get("source", {}))
    facts = environment()
    return {
        "method": experiment.method.name,
        "settings": config.get("method") or {place: repr(part) for place, part in experiment.method.parts.items()},
        "rounds": rounds,
        "seed": experiment.seed,
        "data": {key: value for key, value in source.items() if key not in description_keys},
        "licence": origin.get("source", {}).get("licence", "not stated"),
        "partition": origin.get("partition", {}),
        "clients": len(experiment.federation),
        "range": {"low": 0.0, "high": 1.0, "mean": list(arrays.mean), "std": list(arrays.std)},
        "versions": facts["versions"],
        "revision": facts["git"],
    }
