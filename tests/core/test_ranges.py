"""Ranges of settings: read from annotations, checked wherever a part is made, and shown by ``fedloom list``."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any

import pytest

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, Decay, NonNegative, Range, Words, out_of_range, ranges
from fedloom.base.registry import Registry
from fedloom.base.settings import convert, type_in_words
from fedloom.cli import main
from fedloom.config.keys import Checkpoints
from fedloom.core.local import Local
from fedloom.core.parts import Drift
from fedloom.core.slots import SLOTS
from fedloom.data.augment import augmentations
from fedloom.data.labels import noises, targets
from fedloom.data.partitions import partitions
from fedloom.experiment.callbacks import EarlyStopping
from fedloom.experiment.evaluation import Evaluation
from fedloom.methods import make
from fedloom_apps.audit.attacks import attacks
from fedloom_apps.customise.command import target_methods
from fedloom_apps.deploy.budget import Quota
from fedloom_apps.deploy.settings import Deployment
from fedloom_apps.distill.experiment import SGDConfig
from fedloom_apps.distill.method import Guide
from fedloom_apps.distill.methods import Response, SelectiveResponse
from fedloom_apps.online.experiment import Measures
from fedloom_apps.online.learners import Hedge, learners
from fedloom_apps.online.streams import streams
from fedloom_apps.search.space import SearchSettings
from fedloom_apps.synthesis.judge import ClassifierTraining, EvalConfig

REGISTRIES: list[Registry[Any]] = [
    *SLOTS.values(),
    attacks,
    partitions,
    augmentations,
    noises,
    targets,
    streams,
    learners,
    target_methods,
]
RANGED = [
    (entry.factory, name, bounds)
    for registry in REGISTRIES
    for entry in registry
    if isinstance(entry.factory, type)
    for name, bounds in ranges(entry.factory).items()
]
RECORDS = [
    Local, SGDConfig, Evaluation, Checkpoints, EarlyStopping, Guide, Response, SelectiveResponse, Measures, Hedge,
    SearchSettings, ClassifierTraining, EvalConfig, Quota, Deployment,
]  # fmt: skip
RANGED += [(kind, name, bounds) for kind in RECORDS for name, bounds in ranges(kind).items()]

INF = float("inf")


def test_every_declared_range_is_checked_when_the_part_is_made() -> None:
    """Also in classes with checks of their own, which have to call those of their base class."""
    for kind, name, bounds in RANGED:
        types = {f.name: str(f.type) for f in fields(kind)}
        if name not in types:  # a word about the class, like the kind of targets of a loss
            continue
        names = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
        required: dict[str, Any] = {key: "somewhere" if types[key] == "Path" else (1.0,) for key in names}
        if isinstance(bounds, Words):
            wrong, must = {"nonsense"}, ".*nonsense"
        else:
            low = bounds.low if bounds.above else bounds.low - 1
            high = bounds.high if bounds.below else 2 * bounds.high + 1
            wrong = {low, high, bounds.low - 1, float("nan"), INF} - ({-INF, INF} if bounds.infinite else {-INF})
            must = "must "
        for value in wrong:
            in_mapping = types[name].startswith("Mapping")
            setting = {"head": value} if in_mapping else (value,) if name in required else value
            message = "(must|is {head: nan}, but it must be a mapping of names to numbers)" if in_mapping else must
            with pytest.raises(ConfigError, match=rf"\b{name} {message}"):
                kind(**required | {name: setting})


def test_there_are_many() -> None:
    assert len(RANGED) > 60


@dataclass(frozen=True)
class Slow(Drift):
    """A drift that nobody registered."""

    rate: Decay = 0.5
    passes: Count | None = None
    rates: tuple[float, ...] = ()
    gain: Annotated[float, Range(2, above=True, infinite=True)] = 3.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rate": 1.0}, r"Slow: rate must lie in \[0, 1\), not 1\.0\."),
        ({"passes": 0}, r"Slow: passes must be at least 1, not 0\."),
        ({"rate": float("nan")}, r"rate must lie in \[0, 1\), not nan"),
        ({"gain": 2.0}, r"gain must be a number greater than 2, not 2\.0"),
    ],
)
def test_a_part_of_ones_own_has_its_ranges_checked(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Slow(**settings)


def test_bounds_that_belong_to_a_range_are_inside() -> None:
    assert out_of_range(Slow(0.0, 1, gain=float("inf"))) is None
    assert out_of_range(Slow(passes=None)) is None


def test_ranges_are_words_of_a_type_and_do_not_change_conversion() -> None:
    assert type_in_words(NonNegative) == "a number of at least 0"
    assert type_in_words(Count | None) == "a whole number of at least 1 or null"
    assert convert("steps", 2.0, Count | None) == 2
    assert convert("lr", 3, NonNegative) == 3.0
    with pytest.raises(ConfigError, match=r"lr is 'fast', but it must be a number of at least 0\."):
        convert("lr", "fast", NonNegative)


def test_ranges_of_local_training_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "settings", "local", "--json"]) == 0
    types = {row["key"]: row["type"] for row in json.loads(capsys.readouterr().out)}
    assert types["local.momentum"] == "a number in [0, 1)"
    assert types["local.clip"] == "a number greater than 0 or null"


def test_a_method_refuses_what_its_parts_refuse() -> None:
    with pytest.raises(ConfigError, match=r"method 'fedavgm': momentum must lie in \[0, 1\), not 1\.0\."):
        make("fedavgm", momentum=1.0)
