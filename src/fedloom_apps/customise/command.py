"""``fedloom target``: a model for another party's unlabelled inputs, or for all classes alike, from a finished run."""

from __future__ import annotations

import argparse
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, NonNegativeInt, Positive
from fedloom.base.registry import Ranged, Registry
from fedloom.cli.predict import load_run, run_and_files
from fedloom.config.overrides import parse
from fedloom.config.sections import Choice, Tree
from fedloom.experiment.console import plural, relpath
from fedloom.experiment.deployed import DeployedModel, check_extension
from fedloom.experiment.trained import TrainedRun
from fedloom.parts.mixing.ssa import SelfSupervised
from fedloom_apps.customise.calibration import CCVR
from fedloom_apps.customise.ensemble import TargetFit
from fedloom_apps.customise.model import ABSENT, ClassModels, TargetModel


@dataclass(frozen=True, kw_only=True)
class TargetMethod(Ranged, ABC):
    """Base class: makes a model from unlabelled inputs and the clients' statistics; a frozen dataclass of settings."""

    resamples: NonNegativeInt = 200
    seed: int = 0

    citation: ClassVar[str] = "saerens2002adjusting, alexandari2020"
    makes_model: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, class_models: ClassModels, x: Any) -> TargetModel:
        """The result for inputs x [N, ...], as ``DeployedModel.predict`` takes them."""


target_methods = Registry[TargetMethod | CCVR](
    "method for a target",
    shared={
        "resamples": "number of bootstrap samples of the inputs, for the intervals of the shares.",
        "seed": "seed of the bootstrap.",
    },
)
"""The methods that ``fedloom target method=…`` chooses from."""


@target_methods.register(name="target_head")
@dataclass(frozen=True)
class TargetHead(TargetMethod):
    """The server's features with the head w_c = W⁻¹(μ_c - μ̄)/T, b_c = log π_c + β_c - ½ (μ_c + μ̄)ᵀw_c.

    For ``fedloom target``. π are the target's class shares by EM, as in ``target_prior``; μ_c, W, T and β are those of
    a linear discriminant on sums that clients send, tempered and calibrated on their samples, and μ̄ is the mean of all
    samples. Heads of several targets differ in b alone.
    """

    def __call__(self, class_models: ClassModels, x: Any) -> TargetModel:
        return class_models.target_head(x, self.resamples, self.seed)


@target_methods.register(name="target_fit")
@dataclass(frozen=True)
class TargetMixture(TargetMethod):
    """Σ p_k θ_k of the clients' last models, p fitted through the merged network, for ``fedloom target``.

    The minimum over (a, τ, b) of the mean of CE(r(x), softmax(τ f(x; Σ p_k θ_k) + b)), p = softmax(a), with the
    probable classes r_c(x) ∝ π_c e^{l_c(x)} of each input and π as in ``target_prior``. The run must have kept its
    clients' last models (``evaluation.what=[global,average]``).

    Args:
        steps: steps of Adam, from p_k = n_k / Σ n, τ = 1 and b = 0.
        lr: learning rate of Adam.
        batch_size: inputs per step.
    """

    steps: NonNegativeInt = TargetFit.steps
    lr: Positive = TargetFit.lr
    batch_size: Count = TargetFit.batch_size

    def __call__(self, class_models: ClassModels, x: Any) -> TargetModel:
        return class_models.target_fit(x, TargetFit(self.steps, self.lr, self.batch_size), self.resamples, self.seed)


@target_methods.register(name="fedssa")
@dataclass(frozen=True)
class TargetSelfSupervised(TargetMethod):
    """FedSSA learnt once, for ``fedloom target``: Σ p_k θ_k of the clients' last models, with p by self-supervision.

    The run may be of any method and must have kept its clients' last models (``evaluation.what=[global,average]``). For
    the same inputs p is that of ``method.mixing=ssa`` in the run's last round. FedSSA, table 3. Use it with care: its
    loss measures how confident a client is, not whether it is right.

    Args:
        variance: λ_var ≥ 0, weight of confidence.
        entropy: λ_we ≥ 0, weight of collaboration.
        optimiser: ``sgd``, or ``adam``, whose steps do not depend on the scale of the loss.
        lr: learning rate of the optimiser.
        steps: number of its steps.
        batch_size: inputs per step.
        draws: number of times that views are drawn, at most once per pass.
        views: augmentations that make two views of each input.
    """

    variance: float = SelfSupervised.variance
    entropy: float = SelfSupervised.entropy
    optimiser: Literal["adam", "sgd"] = SelfSupervised.optimiser
    lr: float = SelfSupervised.lr
    steps: int = SelfSupervised.steps
    batch_size: int = SelfSupervised.batch_size
    draws: int = SelfSupervised.draws
    views: tuple[str | Mapping[str, Any], ...] = ("jitter", "blur")
    citation: ClassVar[str] = SelfSupervised.citation

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy()

    def policy(self) -> SelfSupervised:
        """The mixing policy."""
        return SelfSupervised(
            self.variance, self.entropy, self.optimiser, self.lr, self.steps, self.batch_size, self.draws
        )

    def __call__(self, class_models: ClassModels, x: Any) -> TargetModel:
        return class_models.fedssa(x, self.policy(), self.views, self.resamples, self.seed)


@target_methods.register(name="target_prior")
@dataclass(frozen=True)
class TargetShares(TargetMethod):
    """The target's class shares alone, for ``fedloom target``: π maximises Σ_x log Σ_c π_c e^{l_c(x)}, by EM.

    l are the scores of a tempered linear discriminant on sums that clients send. Under label shift, p_U(x) = Σ π_c
    p(x | c), the log-likelihood is concave in π. The result reports shares, intervals, clients and the check; the model
    is the server's. Saerens, Latinne & Decaestecker, 2002.
    """

    makes_model: ClassVar[bool] = False

    def __call__(self, class_models: ClassModels, x: Any) -> TargetModel:
        return class_models.target_prior(x, self.resamples, self.seed)


target_methods.register(name="ccvr")(CCVR)  # takes no inputs, only a finished run


TARGET_METHOD = Choice(target_methods, "target_head")
TARGET_SETTINGS = frozenset(setting for entry in target_methods for setting in entry.parameters)
"""The settings of all methods."""


def build(words: Sequence[str]) -> TargetMethod | CCVR:
    """The method of overrides like ``method=target_fit`` and ``method.steps=100``.

    >>> build(["method=target_fit", "method.steps=100"]).steps, type(build([])).__name__
    (100, 'TargetHead')
    """
    tree = Tree(name=TARGET_METHOD.start)
    for word in words:
        override = parse(word)
        if override.is_sweep:
            raise ConfigError(f"fedloom target takes one method and one value of each setting, not {word}.")
        if override.key[0] != "method":
            raise ConfigError(f"{word} is not a setting of a method for a target; write method=… or method.SETTING=….")
        tree |= TARGET_METHOD.nest("method", override.key[1:], override.values[0])
    return TARGET_METHOD.instantiate(TARGET_METHOD.validate("method", tree))


LEAST = 0.0005  # smallest share that is shown
FEW = 20
"""Number of inputs below which intervals over draws of the inputs are too narrow."""
MISPLACED = 0.5
"""Weights whose clients know less of a target than this fraction of what clients of equal weight know are a warning."""


def command(arguments: argparse.Namespace) -> int:
    """For each file of inputs: write the model, print class shares, clients and the check."""
    path, words = run_and_files(arguments.words, "target", ("data", "method"), TARGET_SETTINGS)
    places = [word.removeprefix("data=") for word in words if word.startswith("data=") and word != "data="]
    files = [Path(place).expanduser() for place in places]
    method_words = [word for word in words if word.split("=")[0].split(".")[0] == "method"]
    method = build(method_words)
    if isinstance(method, CCVR):
        if files or len(method_words) < len(words):
            raise ConfigError("ccvr calibrates one model and takes no inputs; leave data=… out.")
        return write_calibrated(method, path, arguments.out, arguments.json)
    if not files or len(files) + len(method_words) < len(words):
        raise ConfigError("fedloom target needs files of inputs, like: fedloom target run=runs/… data=x.npz")
    if arguments.out is not None and len(files) > 1:
        raise ConfigError("--out names one file, but there are several targets; leave it out.")
    if arguments.out is not None and not method.makes_model:
        raise ConfigError("method=target_prior makes no model, so there is nothing for --out; leave it out.")
    outs = [Path(arguments.out or f"{path.resolve().name}-{file.stem}.safetensors") for file in files]
    for out in outs if method.makes_model else ():
        check_extension(out, "safetensors")
        if out.exists() or outs.count(out) > 1:
            raise ConfigError(f"{out} exists already or would be written twice; choose another file with --out.")
    run, reports = _with_data(path), []
    inputs = [run.server.read(file) for file in files]
    class_models, classes = ClassModels(run), run.federation.train.arrays.names
    for file, arrays, out in zip(files, inputs, outs, strict=True):
        result = method(class_models, arrays["x"])
        facts = as_plain_data(result)  # before anything is written, as are targets that do not fit
        models = by_name(run.server, result.model) if method.makes_model else {"server's model": run.server}
        metrics = {name: measure(model, arrays["x"], arrays["y"]) for name, model in models.items() if "y" in arrays}
        model_file = result.model.export(out) if method.makes_model else None
        reports.append({"data": str(file), "inputs": len(arrays["x"]), "model": model_file and str(model_file)})
        reports[-1] |= {"classes": list(classes)} if classes else {}
        reports[-1] |= facts | {"measured": metrics, "privacy": class_models.privacy and asdict(class_models.privacy)}
        if arguments.json:
            continue
        print(f"target: {relpath(file)}, {plural(len(arrays['x']), 'input')}")
        print(as_text(result, len(arrays["x"]), run.federation.names, classes))
        if class_models.privacy is not None:
            print(f"privacy: {class_models.privacy}")
        if model_file is not None:
            print(f"model: {relpath(model_file)}")
        print_metrics(metrics)
    if arguments.json:
        print(json.dumps(reports, indent=1))
    return 0


def _with_data(path: Path) -> TrainedRun:
    """The models of a federated run whose data can be read again."""
    run = load_run(path)
    if not isinstance(run, TrainedRun):
        raise ConfigError(f"fedloom target makes models of a run of fedloom run, and {path} is another.")
    if run.is_deployment:
        raise ConfigError(
            "fedloom target needs sums over the clients' data, but a deployment's data stay with the nodes; what works "
            "is fedloom predict and fedloom export, with the server's model."
        )
    return run


def as_plain_data(result: TargetModel) -> dict[str, Any]:
    """Class shares, clients and the check as plain data."""

    def numbers(values: np.ndarray | None) -> list[float] | None:
        return None if values is None or not np.isfinite(values).all() else values.tolist()

    prior = {k: numbers(v) if isinstance(v, np.ndarray) else v for k, v in vars(result.prior).items()}
    check = asdict(result.check) | {"holds": result.check.holds}
    return {**prior, "known": numbers(result.known), "p": numbers(result.p), "check": check}


def write_calibrated(method: CCVR, path: Path, file: str | None, as_json: bool) -> int:
    """Write the run's model with the head of CCVR, and measure both on the common test set, if there is one."""
    out = Path(file or f"{path.resolve().name}-ccvr.safetensors")
    check_extension(out, "safetensors")
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another file with --out.")
    run = _with_data(path)
    model, test, privacy = method(run), run.federation.test, method.privacy(run)
    models = by_name(run.server, model) if len(test) else {}
    metrics = {name: measure(model, test.x, test.y) for name, model in models.items()}
    model_file = model.export(out)
    if as_json:
        report = {"model": str(model_file), "measured": metrics, "privacy": privacy and asdict(privacy)}
        print(json.dumps([report], indent=1))
        return 0
    if privacy is not None:
        print(f"privacy: {privacy}")
    print(f"model: {relpath(model_file)}")
    print_metrics(metrics)
    return 0


def by_name(server: DeployedModel, model: DeployedModel) -> dict[str, DeployedModel]:
    """The names of two models in a comparison."""
    return {"server's model": server, "this model": model}


def measure(model: DeployedModel, x: Any, y: Any) -> dict[str, float | None]:
    """The metrics of a model on labelled inputs, without those that it cannot have there, which are NaN.

    The loss is None, which stands for infinite, if some inputs are of a class that it gives share 0: the logit of such
    a class is finite, -1e30, so that the mean loss is about 1e30 divided by the number of inputs.
    """
    metrics = {name: value for name, value in model.evaluate(x, y).items() if not np.isnan(value)}
    return {name: value if value < -1e-10 * ABSENT else None for name, value in metrics.items()}


def print_metrics(metrics_by_model: Mapping[str, Mapping[str, float | None]]) -> None:
    """Print the metrics of models on labelled inputs, on standard error."""
    never = "infinite, as some inputs are of a class with an estimated share of 0"
    for name, numbers in metrics_by_model.items():
        words = (f"{key} {never if value is None else f'{value:.4g}'}" for key, value in numbers.items())
        print(f"{name}: {', '.join(words)}", file=sys.stderr)


def as_text(result: TargetModel, inputs: int, names: Sequence[str] = (), classes: Sequence[str] = ()) -> str:
    """Class shares with intervals, the clients from which the target is known, and the check, as text."""
    prior = result.prior
    has_intervals = np.isfinite(prior.high).all()
    ends = zip(prior.low, prior.high, strict=True)
    interval = [f" ({100 * low:.1f} to {100 * high:.1f})" if has_intervals else "" for low, high in ends]
    order = np.argsort(-prior.shares, kind="stable")
    classes_shown = [c for c in order if prior.shares[c] >= LEAST]
    rows = [f"  {classes[c] if classes else c}: {100 * prior.shares[c]:.1f} %{interval[c]}" for c in classes_shown]
    if len(classes_shown) < len(order):
        most = f", up to {100 * prior.high[order[len(classes_shown) :]].max():.1f} %" if has_intervals else ""
        rows.append(f"  each other class: 0.0 %{most}")

    def clients(shares: np.ndarray) -> str:
        largest = [k for k in np.argsort(-shares, kind="stable")[:10] if shares[k] >= 0.005]
        return ", ".join(f"{names[k] if names else f'client {k}'}: {100 * shares[k]:.0f} %" for k in largest)

    few = f", too narrow with only {plural(inputs, 'input')}" if inputs < FEW else ""
    intervals = (
        f"{100 * prior.coverage:g} % intervals over draws of the inputs{few}" if has_intervals else "without intervals"
    )
    lines = [f"class shares ({intervals}):", *rows]
    if np.isfinite(result.known).all():
        lines.append(f"the training samples of these classes come from {clients(result.known)}")
    if result.p is not None:
        lines.append(f"weights of the clients' models: {clients(result.p)}")
        if result.p @ result.known < MISPLACED * result.known[result.p > 0].mean():  # not if NaN
            lines.append("WARNING: these weights favour clients that know little of these classes.")
    return "\n".join([*lines, f"check of label shift: {result.check}"])
