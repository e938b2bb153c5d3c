"""Configurations: what is typed, how it is interpreted, and that it survives a round trip through YAML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.base import yaml
from fedloom.base.errors import ConfigError
from fedloom.base.settings import convert
from fedloom.config import CommandSchema, build, build_method, resolve, sweep, to_yaml
from fedloom.config.overrides import ParsedOverride, parse
from fedloom.config.sections import arguments, sections_of
from fedloom.core.slots import label
from fedloom.engines import engines
from fedloom.methods import methods
from fedloom_apps.online.config import ONLINE


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_order_of_overrides_does_not_matter():
    words = ["method.alpha=.1", "method.mixing.x=1", "method=feddyn", "method.mixing=by_samples", "partition.classes=2"]
    overrides = ["method.alpha=.1", "method=feddyn", "method.server.lr=2", "method.server=sgd"]
    assert resolve(overrides).values == resolve(overrides[::-1]).values
    with pytest.raises(ConfigError, match="mixing 'by_samples' has no setting 'x'"):
        resolve(words)


def test_the_last_of_two_values_counts():
    assert resolve(["seed=1", "seed=2"])["seed"] == 2
    assert [config["seed"] for config in sweep(["seed=1,2", "seed=3"])] == [3]


def test_another_choice_drops_the_settings_of_the_one_before(tmp_path: Path):
    recipe = write(tmp_path / "a.yaml", "method: {name: feddyn, alpha: 0.5}\npartition: pathological\n")
    assert resolve([], recipe)["method.alpha"] == 0.5
    assert resolve(["method=feddyn"], recipe)["method.alpha"] == 0.5
    assert resolve(["method=fedprox"], recipe)["method"] == {"name": "fedprox", "mu": 0.01}
    assert resolve(["partition=shards"], recipe)["partition.shards"] == 2


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["method=feddyn", "method.mixing=by_samples"], "feddyn+by_samples"),
        (["method=feddyn", "method.mixing=uniform"], "feddyn"),
        (["method=feddyn", "method.drift=none"], "feddyn-dynamic"),
        (["method=feddyn", "method.drift.alpha=0.5"], "feddyn"),
        (["method=fedavg", "method.drift=scaffold", "method.server=sgd"], "fedavg+scaffold+sgd"),
        (["method=fedavg", "method.objective=[cross_entropy,proximal]"], "fedavg+proximal"),
        (["method=fedprox", "method.objective=cross_entropy"], "fedprox-proximal"),
        (["method={name: fedavg, mixing: uniform}"], "fedavg+uniform"),
    ],
)
def test_a_method_is_named_after_what_was_replaced(words: list[str], name: str):
    assert build_method(resolve(words)).name == name


def test_a_replaced_part_gets_its_settings():
    words = ["method=fedavg", "method.server.beta2=.9", "method.server=yogi", "method.server.lr=.5"]
    method = build_method(resolve(words))
    assert (label(method.server), method.server.beta2, method.server.lr) == ("yogi", 0.9, 0.5)  # pyright: ignore


def test_settings_of_a_presets_own_part_start_at_the_presets_values():
    config = resolve(["method=fedavgm", "method.server.lr=0.5"])
    assert config["method.server"] == {"name": "sgd", "lr": 0.5, "momentum": 0.9, "nesterov": False}
    method = build_method(resolve(["method=fedprox", "method.mu=2"]))
    assert method.objective[1].mu == 2  # pyright: ignore
    method = build_method(resolve(["method=fedprox", "method.objective.proximal.mu=3"]))
    assert [label(term) for term in method.objective] == ["cross_entropy", "proximal"]
    assert method.objective[1].mu == 3  # pyright: ignore


@pytest.mark.parametrize("entry", methods, ids=lambda entry: entry.name)
def test_every_method_comes_back_from_yaml(entry, tmp_path: Path):
    config = resolve([f"method={entry.name}", "clients=5", "seed=3"])
    again = resolve([], write(tmp_path / "recipe.yaml", to_yaml(config)))
    assert again.values == config.values
    assert build_method(again) == entry.make()


def test_replaced_parts_come_back_from_yaml(tmp_path: Path):
    words = ["method=feddyn", "method.objective=[cross_entropy,proximal]", "method.objective.proximal.mu=0.2",
             "method.server=adam", "method.mixing=by_samples"]  # fmt: skip
    config = resolve(words)
    again = resolve([], write(tmp_path / "recipe.yaml", to_yaml(config)))
    assert again.values == config.values
    assert build_method(again) == build_method(config)


def test_what_is_built_is_what_was_asked_for():
    line = (
        "method=fedavg clients=7 cohort=3 rounds=4 local.epochs=2 local.lr=.5 model.hidden=[8,4] seed=5 "
        "evaluation.what=[global,average] engine=processes engine.workers=2 validation=0.1"
    )
    words = line.split()
    experiment = build(resolve(words))
    assert (len(experiment.federation), experiment.cohort, experiment.rounds) == (7, 3, 4)
    assert (experiment.local.epochs, experiment.local.lr) == (2, 0.5)
    assert experiment.evaluation.what == ("global", "average")
    assert (experiment.engine, dict(experiment.engine_settings), experiment.seed) == (
        "processes",
        {"workers": 2, "start": "auto", "devices": ()},
        5,
    )
    assert experiment.model().head.in_features == 4  # pyright: ignore
    assert experiment.federation.validation.index.sizes.sum() > 0
    assert experiment.config["local"]["lr"] == 0.5


def test_defaults_go_with_the_choice():
    assert resolve([])["clients"] == 20
    synthetic = resolve(["data=synthetic", "method=feddyn"])
    assert (synthetic["partition.name"], synthetic["model.name"], synthetic["clients"]) == ("natural", "logistic", None)
    assert resolve(["data=synthetic", "partition=iid"])["clients"] == 20
    assert resolve(["partition=natural", "data=synthetic", "clients=4"])["clients"] == 4


def test_clients_that_are_named_are_the_clients(tmp_path: Path):
    words = ["data=table:visits.csv", "data.client=clinic"]
    config = resolve(words)
    assert (config["partition.name"], config["clients"]) == ("natural", None)
    assert resolve([*words, "partition=iid"])["clients"] == 20
    for method in ("fedevg", "fedcvae"):  # which has its own number of clients
        assert resolve([*words, f"method={method}"])["clients"] is None
        assert resolve([*words, f"method={method}", "partition=iid"])["clients"] == 10
    recipe = write(tmp_path / "a.yaml", "data: {name: table, path: visits.csv, client: clinic}\n")
    assert resolve([], recipe)["partition.name"] == "natural"
    assert resolve(["data=digits"], recipe)["partition.name"] == "dirichlet"
    assert resolve(["data=table:visits.csv"])["partition.name"] == "dirichlet"


def test_clients_in_a_file_of_arrays_are_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    arrays = {"x_train": np.zeros((4, 2)), "y_train": np.arange(4) % 2}
    np.savez("dealt.npz", **arrays)
    np.savez("own.npz", **arrays, client_train=np.arange(4) // 2)
    (tmp_path / "own").mkdir()
    np.save("own/client_train.npy", np.arange(4))
    for path in ("own.npz", "own", str(tmp_path / "own.npz")):
        config = resolve([f"data=npz:{path}"])
        assert (config["partition.name"], config["clients"]) == ("natural", None)
    assert resolve(["data=npz", "data.path=own.npz", "partition=iid", "clients=3"])["partition.name"] == "iid"
    for word in ("data=npz:dealt.npz", "data=npz:nix.npz", "data=folder:own"):
        assert resolve([word])["partition.name"] == "dirichlet"


WRITTEN = {
    "": "", "''": "", "a b": "a b", " a ": "a", "a:b": "a:b", "1:30": "1:30", "yes": "yes", "017": "017", "1_000": 1000,
    "-.5": -0.5, "1.": 1.0, "1e-3": 0.001, "-inf": -math.inf, "NULL": None, "True": True, "12abc": "12abc", "#a": "#a",
    "/x/y z": "/x/y z", r"a\,b": "a,b", r"C:\x": r"C:\x", "'x,y'": "x,y", r"'it\'s'": "it's", '"1"': "1", "a=b": "a=b",
    "[]": [], "[ a, b c ]": ["a", "b c"], "[[1],'2']": [[1], "2"], "{}": {},
    "{name:feddyn,alpha:.1}": {"name": "feddyn", "alpha": 0.1},
    "{a: [1,{b: null}], 3: x}": {"a": [1, {"b": None}], "3": "x"}, "[${seed},1]": ["${seed}", 1],
    "(1,2)": None, "[1,2": None, "[a,]": None, "{a}": None, "{a: }": None, "x]": None, "'x'y": None, "it's": None,
    ",1": None, "a(b)": None, "[range(1,3)]": None, "1,": None, "range(1,step=2)": None,
    "range(a,b)": None, "range(0,inf)": None,
}  # fmt: skip
"""Values as they are written, and what they are; None if they cannot be read, but for null."""


@pytest.mark.parametrize(("text", "value"), WRITTEN.items())
def test_values_as_they_are_written(text: str, value: Any) -> None:
    if value is None and text != "NULL":
        with pytest.raises(ConfigError, match="cannot be read"):
            parse(f"a={text}")
    else:
        assert parse(f"a={text}") == ParsedOverride(("a",), (value,))
        assert type(parse(f"a={text}").values[0]) is type(value)


def test_sweeps_as_they_are_written() -> None:
    for text, values in (
        ("a, b", ("a", "b")), ("1,[2,3],{c: 4}", (1, [2, 3], {"c": 4})), ("choice(a,'b,c')", ("a", "b,c")),
        ("range(3)", (0, 1, 2)), ("range(3,0,-1)", (3, 2, 1)), ("range(0,.3,.1)", (0.0, 0.1, 0.2)),
        ("range(1, stop=3)", (1, 2)), ("glob([x*,y],exclude=xy)", ("x", "y")),
    ):  # fmt: skip
        assert parse(f"a={text}", {"a": ["x", "xy", "y", "z"]}) == ParsedOverride(("a",), values, is_sweep=True)


def test_references():
    assert resolve(["data=synthetic", "data.seed=${seed}", "seed=4"])["data.seed"] == 4
    with pytest.raises(ConfigError, match="sed"):
        resolve(["data=synthetic", "data.seed=${sed}"])


def test_recipes(tmp_path: Path):
    recipe = write(tmp_path / "a.yaml", "method: feddyn\nlocal: {lr: 1e-2}\nevaluation: {what: [global]}\nout: there\n")
    config = resolve(["local.epochs=3"], recipe)
    assert (config["local.lr"], config["local.epochs"], config["evaluation.what"]) == (0.01, 3, ["global"])
    assert config.out == Path("there")
    assert resolve(["out=here"], recipe).out == Path("here")
    stored = {**config.values, "identity": {"seed": 0}, "machine": "m"}
    config_yaml = write(tmp_path / "config.yaml", yaml.dump(stored))
    assert resolve([], config_yaml).values == config.values


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- 1\n", "mapping"),
        ("a: [\n", "is not a YAML file"),
        ("method: feddyn\nlocal: 3\n", "local is 3"),
        ("lokal: {}\n", "unknown key 'lokal'; did you mean 'local'"),
        ("resume: x\n", "belongs on the command line"),
        ("method: [a, b]\n", "method is ['a', 'b'], but it must be a name"),
    ],
)
def test_bad_recipes(text: str, sentence: str, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        resolve([], write(tmp_path / "a.yaml", text))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_sweeps():
    assert [config["method.name"] for config in sweep(["method=glob(*y*,exclude=[*similarity,*async,pf*])"])] == [
        "feddyn", "fedyogi",
    ]  # fmt: skip
    configs = sweep(["method=fedadam,{name: feddyn, alpha: .5}", "seed=range(1,3)"])
    assert [(config["method.name"], config["seed"]) for config in configs] == [
        ("fedadam", 1), ("fedadam", 2), ("feddyn", 1), ("feddyn", 2),
    ]  # fmt: skip
    assert configs[2]["method.alpha"] == 0.5
    assert dict(configs[3].sweep_values)["seed"] == 2
    for words in ["seed=interval(0,1)", "seed=glob(*)", "method=glob(nix*)", "method=glob(a*),fedavg"]:
        with pytest.raises(ConfigError):
            sweep([words])


def test_paths_are_literal():
    assert resolve(["out=a,b=c [d]"]).out == Path("a,b=c [d]")
    assert resolve(["out=~/x"]).out == Path("~/x").expanduser()
    assert resolve(["data=npz", "data.path=~/é.npz"])["data.path"] == str(Path("~/é.npz").expanduser())


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3.0, int, 3),
        (3, float, 3.0),
        ("x", int | str, "x"),
        (3, int | str, 3),
        ([1, 2], tuple[int, ...], (1, 2)),
        (1, tuple[int, ...], (1,)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
    ],
)
def test_conversion(value, annotation, expected):
    result = convert("key", value, annotation)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [(True, int), (1.5, int), (float("inf"), int), (float("nan"), float), (None, float), ("1", float), (1, bool),
     (True, str), ([1], tuple[int, int]), ([1, "a"], tuple[int, ...]), ([1], int), ({}, float), (1, dict[str, int])],
)  # fmt: skip
def test_refused_conversion(value, annotation):
    with pytest.raises(ConfigError, match=r"^key is .*, but it must be "):
        convert("key", value, annotation)


@dataclass(frozen=True)
class Weather:
    """Args: wind: how strong it is."""

    wind: float = 1.0


@dataclass(frozen=True)
class Conditions:
    """Conditions as they might be one day."""

    federation: Any
    weather: Weather
    hours: int = 3
    engine: str = "serial"
    engine_settings: Mapping[str, Any] = field(default_factory=dict)


def test_a_new_condition_is_a_key_by_itself():
    sections = sections_of(Conditions, ("federation",), engine=engines)
    schema = CommandSchema("federated", sections, defaults={})
    config = schema.resolve(["engine=processes", "engine.workers=2", "weather.wind=3", "hours=7"])
    engine = {"name": "processes", "workers": 2, "start": "auto", "devices": []}
    assert config.values == {"weather": {"wind": 3.0}, "hours": 7, "engine": engine}
    conditions = Conditions(federation=None, **arguments(Conditions, sections, config.values))
    assert (conditions.weather, conditions.hours) == (Weather(3.0), 7)
    assert conditions.engine == "processes"
    assert conditions.engine_settings == {"workers": 2, "start": "auto", "devices": ()}


FIRST = ["method=fedavg", "clients=20"]


def test_participation_and_cohort_may_not_contradict_each_other(tmp_path: Path):
    recipe = write(tmp_path / "recipe.yaml", "method: fedavg\nclients: 20\nparticipation: 0.3\ncohort: 3\n")
    for words, base in (
        (["participation=.3", "cohort=3"], None),
        ([], recipe),
        (["participation=.2", "cohort=5"], recipe),
    ):
        with pytest.raises(ConfigError, match=r"both set the size of cohorts; leave one out\."):
            resolve([*FIRST, *words], base)
    with pytest.raises(ConfigError, match=r"participation=0\.3 and cohort=3 both set the size of cohorts"):
        sweep(["method=fedavg,feddyn", "participation=.15,.3", "cohort=3"])
    for words in (["cohort=3"], ["participation=.15", "cohort=3"], ["participation=.3", "cohort=null"]):
        assert resolve([*FIRST, *words])["participation"] in (0.5, 0.15, 0.3)
    assert resolve(["cohort=4"], recipe)["cohort"] == 4
    assert resolve(["cohort=null"], recipe)["cohort"] is None


def test_epochs_are_not_given_in_vain(tmp_path: Path) -> None:
    recipe = write(tmp_path / "recipe.yaml", "method: fedavg\nlocal: {epochs: 2, steps: 15}\n")
    for words, base in ((["method=fedevg"], None), (["method=fedavg"], recipe)):
        with pytest.raises(
            ConfigError, match=r"local\.epochs=3 and local\.steps=15 both .*, or add local\.steps=null\."
        ):
            resolve([*words, "local.epochs=3"], base)
        assert resolve([*words, "local.epochs=3", "local.steps=null"], base)["local.epochs"] == 3
        assert resolve([*words, "local.steps=4"], base)["local.steps"] == 4
    with pytest.raises(ConfigError, match=r"local\.epochs=3 and local\.steps=4 both .*; leave one out\."):
        resolve(["method=fedavg", "local.epochs=3", "local.steps=4"])
    with pytest.raises(ConfigError, match=r"local\.steps=10 both set the length"):
        ONLINE.resolve(["local.epochs=3"])


def test_a_complete_recipe_has_both_and_a_participation_does_not_vanish_in_it(tmp_path: Path):
    config = resolve([*FIRST, "cohort=3"])
    recipe = write(tmp_path / "recipe.yaml", to_yaml(config))
    assert resolve([], recipe).values == config.values
    assert resolve(["cohort=4"], recipe)["cohort"] == 4
    with pytest.raises(ConfigError, match=r"participation=0\.2 and cohort=3 .*; leave one out, or add cohort=null\."):
        resolve(["participation=.2"], recipe)
    assert build(resolve(["participation=.2", "cohort=null"], recipe)).cohort_size == 4


def test_a_setting_by_itself_and_within_another_is_refused(tmp_path: Path) -> None:
    for text in ("local.lr: 0.1\nlocal: {lr: 0.2}\n", "local: {lr: 0.2}\nlocal.lr: 0.1\n"):
        with pytest.raises(ConfigError, match=r"^local.lr is set twice, alone and within local; leave one out"):
            resolve([], write(tmp_path / "a.yaml", text))
    assert resolve(["local.lr=0.3"], write(tmp_path / "a.yaml", "local: {lr: 0.2, epochs: 2}\n"))["local.lr"] == 0.3
