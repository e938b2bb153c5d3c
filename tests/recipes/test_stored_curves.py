"""Stored results still come out of the code: what is cheap of them is made again, as far as it tells settings apart."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from fedloom.config.keys import build, resolve
from fedloom.experiment.federated import run
from fedloom_apps.claims.register import ClaimFile, read_claim

RECIPES = Path(__file__).parents[2] / "recipes"
CLAIMS = RECIPES / "claims"
LEARNT = 0.4
CPU = Path("/proc/cpuinfo")
ROUNDING = 0.002 if CPU.is_file() and "AuthenticAMD" in CPU.read_text() else 0.06
"""What training makes of the rounding of a processor: most results were stored on one of AMD, others round apart."""
STORED = [read_claim(CLAIMS / f"{path.stem}.yaml") for path in sorted(CLAIMS.glob("results/*.json"))]
AGAIN: dict[str, tuple[str, Callable[[Any, Any, Path], Any]]] = {}
"""By the file of results: the recipe's module, and what makes a small part of the file again, at its place there."""
WITH_DATA = pytest.mark.skipif(not os.environ.get("FEDLOOM_DATA"), reason="FEDLOOM_DATA names no folder with the data")


@pytest.mark.exhaustive
@WITH_DATA
@pytest.mark.parametrize("file", [file for file in STORED if len(file.metrics) == 1], ids=lambda file: file.name)
def test_the_first_rounds_of_a_stored_run_are_those_of_today(file: ClaimFile) -> None:
    """Of the method that is cheapest; a curve that rises steeply tells other clients, cohorts and batches apart.

    Claims that rest on two metrics are those of runs which are evaluated every 50 rounds; they are left to a replay.
    """
    (metric,) = file.metrics
    method = min(runs := file.results()["runs"], key=lambda name: file.minutes[name])
    seed = min(runs[method], key=int)
    curve = runs[method][seed]["curves"][metric]
    rounds = next(number for number, value in enumerate(curve, start=1) if value > LEARNT)
    words = [*file.words(method), f"seed={seed}", f"rounds={rounds}", "engine=serial"]
    values = [record[metric] for record in run(build(resolve(words))).history]
    assert values == pytest.approx(curve[:rounds], abs=0.005)  # processors round apart


def again(file: str, module: str) -> Callable[[Callable[[Any, Any, Path], Any]], None]:
    """Enter a function of the recipe's module, the file's contents and a folder for runs in the table."""

    def enter(make: Callable[[Any, Any, Path], Any]) -> None:
        AGAIN[file] = module, make

    return enter


class Among:
    """Stored runs by name, one of which is made again: its settings are still those that the recipe chooses."""

    def __init__(self, results: Any, name: str) -> None:
        self.results, self.runs, self.name, self.reruns = results, results["runs"], name, {}

    def __call__(self, name: str, make: Callable[[], Any]) -> Any:
        if name == self.name:
            self.reruns[name] = make()
        return self.runs[name]

    def save(self) -> None:
        """Results stay as they are."""


def rerun(data: Any, name: str, collect: Callable[[Any], object]) -> Any:
    """A run of this name, made again when the recipe asks for it."""
    collect(among := Among(data, name))
    return {"runs": {name: among.reruns[name]}}


@again("topology/personal_mnist", "personal")
def _(recipe: Any, data: Any, out: Path) -> Any:
    name = "classes | FedPer | lr 0.05 | seed 1"
    return rerun(data, name, lambda stored: recipe.collect(stored, "mnist", ["classes"], ["FedPer"], [1]))


@again("topology/graphs", "graphs")
def _(recipe: Any, data: Any, out: Path) -> Any:
    return rerun(data, "DFedAvgM | dirichlet | complete | lr 0.05 | seed 1", lambda s: recipe.collect(s, [1]))


@again("trust/compressed_digits", "compressed")
def _(recipe: Any, data: Any, out: Path) -> Any:
    both = (recipe.TopK(0.03), recipe.QSGD(4))
    return rerun(data, recipe.name("iid", both, 1), lambda s: recipe.collect(s, "digits", [1], data["target"]))


@again("trust/hostile_digits", "hostile")
def _(recipe: Any, data: Any, out: Path) -> Any:
    name = recipe.name("iid", recipe.Krum(0.2, selected=None), recipe.ALIE(z=1.5), 1)
    return rerun(data, name, lambda stored: recipe.collect(recipe.Study(), stored, [1]))


@again("trust/private_digits", "private")
def _(recipe: Any, data: Any, out: Path) -> Any:
    name = recipe.name("FedDyn", recipe.inf, *data["chosen"]["FedDyn"]["inf"], 1)
    return rerun(data, name, lambda stored: recipe.collect(stored, "digits", [1], recipe.ROUNDS))


@again("trust/membership", "membership")
def _(recipe: Any, data: Any, out: Path) -> Any:
    return {"runs": {"plain SGD | model 0": recipe.model(recipe.TRAINING["plain SGD"], 0)}}


@again("trust/inversion", "inversion")
def _(recipe: Any, data: Any, out: Path) -> Any:
    recipe.DIGITS = 1
    trial = recipe.trial(recipe.TRAINING["C = 1, z = 0.01"])
    return {"runs": {"C = 1, z = 0.01": {key: trial[key] for key in ("mse", "images")}}}


@again("devices/hours", "hours")
def _(recipe: Any, data: Any, out: Path) -> Any:
    name = "mnist | rare | FedBuff | lr 0.2, server_lr 1 | seed 1"
    return rerun(data, name, lambda stored: recipe.collect(stored, "mnist", [1]))


@again("fair/silo", "silo")
def _(recipe: Any, data: Any, out: Path) -> Any:
    heart = data["data"]["heart_published"] | {"runs": {}}
    bench = recipe.common.Bench(out, only=("TERM", "AAggFF"))
    recipe.RECIPE.fill(bench, "heart_published", heart, [10], lambda: None)
    return {"data": {"heart_published": {"runs": heart["runs"]}}}


@again("fair/plug_and_play", "plug_and_play")
def _(recipe: Any, data: Any, out: Path) -> Any:
    heart = data["data"]["heart_published"] | {"runs": {}}
    recipe.ALGORITHMS = {"FedYogi": recipe.ALGORITHMS["FedYogi"]}
    recipe.fill(recipe.Bench(out), "heart_published", heart, [10], lambda: None)
    return {"data": {"heart_published": {"runs": heart["runs"]}}}


@again("fair/responses", "responses")
def _(recipe: Any, data: Any, out: Path) -> Any:
    heart = data["data"]["heart"] | {"runs": {}}
    recipe.CDFS = ("weibull",)
    recipe.fill(recipe.Bench(out), "heart", heart, [2], lambda: None)
    return {"data": {"heart": {"runs": heart["runs"]}}}


@again("fair/as_coded", "as_coded")
def _(recipe: Any, data: Any, out: Path) -> Any:
    return {"runs": {"AAggFF, as coded": {"10": recipe.trial(recipe.Bench(out), "AAggFF, as coded", 10)}}}


@again("superfed/pfedme_rate", "pfedme_rate")
def _(recipe: Any, data: Any, out: Path) -> Any:
    return {"runs": {"0.01": {"0": recipe.trial(0.01, 0)}}}


@again("superfed/table_2_3_scripts", "table_2_3")
def _(recipe: Any, data: Any, out: Path) -> Any:
    """The first of ten looks."""
    clients = recipe.data(recipe.common.mnist(), 500, 0)
    experiment = recipe.experiment("FedAvg", clients, 500, 0, recipe.common.SCRIPTS)
    recipe.common.run_or_resume(replace(experiment, rounds=50), out / "run")
    return {"runs": {"500": {"FedAvg": {"0": {"validation": recipe.common.cell(out / "run")["validation"]}}}}}


@again("superfed/as_coded", "as_coded")
def _(recipe: Any, data: Any, out: Path) -> Any:
    return {"runs": {"SuPerFed-MM, as coded": {"0": recipe.trial("SuPerFed-MM, as coded", 0, recipe.ROUNDS)}}}


@again("ssa/defaults", "defaults")
def _(recipe: Any, data: Any, out: Path) -> Any:
    name = "FedSSA, SGD, λ_var 10"
    return {"runs": {name: {"skew": {"1": recipe.accuracy(name, "skew", 1)}}}}


@again("ssa/ranking", "ranking")
def _(recipe: Any, data: Any, out: Path) -> Any:
    return {"runs": {"images as they are": {"1": recipe.look(replace(recipe.SCALE, rounds=1), (), 1)}}}


@again("distill/federated", "federated")
def _(recipe: Any, data: Any, out: Path) -> Any:
    experiment = recipe.experiment(recipe.CASES["FedAvg"], recipe.data(0)[0], out / "none", 0, 10)
    recipe.run(experiment, out / "run")
    curve = recipe.curve(out / "run")
    return {"runs": {"FedAvg": {"0": {key: curve[key] for key in ("rounds", "accuracy", "up", "down")}}}}


@again("distill/students", "students")
def _(recipe: Any, data: Any, out: Path) -> Any:
    """Cross entropy, which needs no teacher."""
    name = "as published/CE"
    student = recipe.student(recipe.CASES[name], recipe.data(recipe.SAMPLES), None, 0, None, short=False)
    result = recipe.distill.run(student)
    curve = [[record["passes"], record["global/accuracy"]] for record in result.history]
    return {"runs": {name: {"0": {"accuracy": result.summary["selected"]["accuracy"], "curve": curve}}}}


@again("distill/toys", "toys")
def _(recipe: Any, data: Any, out: Path) -> Any:
    toy, course = recipe.intervals(seed=1, samples=1000), recipe.Course(**data["courses"]["intervals"]["KD"])
    return {"toys": {"intervals": {"methods": {"KD": {"1": recipe.cell(toy, recipe.train(toy, course, 100, 1))}}}}}


@again("feddyn/mnist_dirichlet", "mnist_dirichlet")
def _(recipe: Any, data: Any, out: Path) -> Any:
    history = run(recipe.STUDY.experiment("FedAvg", 0, 3, "serial")).history
    curves = importlib.import_module("common").compact(history, recipe.STUDY.parameters, "accuracy")
    return {"runs": {"FedAvg": {"seed0": {key: curves[key] for key in ("cost", "average", "global")}}}}


@again("feddyn/table_a4", "table_a4")
def _(recipe: Any, data: Any, out: Path) -> Any:
    federation, best = recipe.draw("type3", 6), data["settings"]["type3"]["chosen"]
    points = [point for method in recipe.METHODS for point in recipe.grid(method) if str(point) == best[method]]
    runs = {point.method: recipe.attempt(point, federation, 0.0, 4, 6) for point in points}
    figures = {name: {key: record[key] for key in ("cost", "average", "global")} for name, record in runs.items()}
    return {"settings": {"type3": {"draws": {"6": {"optimum": recipe.optimum(federation), "runs": figures}}}}}


@again("fedhen/tables", "tables")
def _(recipe: Any, data: Any, out: Path) -> Any:
    run(recipe.experiment(recipe.METHODS["FedHeN"], recipe.data("iid", 0), 0, 6), out / "iid/FedHeN/seed0")
    cell = recipe.collect(out, {})["runs"]["iid"]["FedHeN"]["0"]
    return {"runs": {"iid": {"FedHeN": {"0": {key: cell[key] for key in ("at", *recipe.CURVES)}}}}}


@again("pfl/tables", "tables")
def _(recipe: Any, data: Any, out: Path) -> Any:
    """The first look."""
    name, scale = "PFLDyn (Proto)", recipe.SCALES["reduced"]
    clients = recipe.data(recipe.average_blocks(recipe.sources.make("cifar10"), scale.shrink), "acid", 5, scale, 0)
    method = recipe.method(name, data["cells"]["acid 5"]["picked"]["alpha"][name])
    experiment = recipe.experiment(method, clients, scale, 0, scale.every)
    curves = recipe.train(name, experiment, scale, scale.inner[0], out / "run")
    return {"cells": {"acid 5": {"curves": {name: {"0": curves[name]}}}}}


@again("pfl/letters", "letters")
def _(recipe: Any, data: Any, out: Path) -> Any:
    """The first look."""
    name, tables = "PFLDyn (Proto)", recipe.tables
    scale = replace(recipe.SCALE, rounds=recipe.SCALE.every)
    letters = tables.average_blocks(recipe.sources.make("emnist_l"), scale.shrink)
    federation = tables.data(letters, "alid", recipe.CLASSES, scale, 0)
    trials = data["splits"]["alid"]["trials"][name]
    method = tables.method(name, float(max(trials, key=trials.get)), scale.inner[0])
    experiment = tables.experiment(method, federation, scale, 0, scale.rounds)
    return {
        "splits": {"alid": {"runs": {name: {"0": tables.train(name, experiment, scale, scale.inner[0], out)[name]}}}}
    }


@again("online/s_mnist", "streams")
def _(recipe: Any, data: Any, out: Path) -> Any:
    setting = recipe.STUDIES["s_mnist"].at(10, recipe.best(data["tuning"]["K 10"]["MOML"]))
    result = recipe.common.run(setting, "MOML", 12, 0, out / "run")  # of tens; another processor flips a later one
    return {"runs": {"K 10": {"MOML": {"0": {key: result[key] for key in ("ctm", "bytes")}}}}}


@again("search/compositions", "compositions")
def _(recipe: Any, data: Any, out: Path) -> Any:
    """The final runs of what a search chose; APFL moved w first when it was run."""
    words = (*recipe.COMMON, *recipe.DATA["digits"], *recipe.SEARCHES["named"], "seed=200", "search.methods=[apfl]")
    search = recipe.build(recipe.SEARCH.resolve(words))
    parameters = {"method": "apfl", "method.w_first": True, "local.lr": 0.3}
    scores = [run(search.make(parameters, seed, False)).history[-1][search.settings.goal] for seed in (201, 202, 203)]
    return {"runs": {"digits": {"named": {"200": {"score": fmean(scores)}}}}}


@again("sides/table_7_1", "table_7_1")
def _(recipe: Any, data: Any, out: Path) -> Any:
    name, scale = "FedAvg cross entropy", replace(recipe.SCALES["reduced"], rounds=6)
    experiment = recipe.experiment(recipe.CASES[name], recipe.data(scale, 0), scale, out / "none", 0)
    run(experiment, out / "seed0" / name.replace(" ", "_"))
    cell = recipe.collect(out, {})["runs"][name]["0"]
    return {"runs": {name: {"0": {key: cell[key] for key in ("rounds", "accuracy")}}}}


@again("synthesis/homogenise_digits", "homogenise")
def _(recipe: Any, data: Any, out: Path) -> Any:
    digits = recipe.table_4_2.source(*next(iter(recipe.table_4_2.SCALES["digits"].sides.items())))
    clients = recipe.table_4_2.federation(digits, 10, recipe.ALPHA, 1)
    return {"runs": {"nothing": {"1": recipe.train(clients, None, "", 1, 4, 1)}}}


def differences(new: Any, stored: Any, place: str = "") -> Iterator[str]:
    """Where figures that both have differ by more than rounding; of curves the first values, as many as are new."""
    if isinstance(new, dict):
        assert new.keys() & stored.keys(), f"{place}: {[*new]} are not stored"
        for key in (new.keys() & stored.keys()) - {"seconds", "distance"}:
            yield from differences(new[key], stored[key], f"{place} > {key}")
    elif isinstance(new, list):
        for number, (item, stored_item) in enumerate(zip(new, stored, strict=False)):
            yield from differences(item, stored_item, f"{place} > {number}")
    elif new != pytest.approx(stored, abs=ROUNDING):
        yield f"{place}: {stored} is stored, {new} computed"


@pytest.mark.exhaustive
@WITH_DATA
@pytest.mark.filterwarnings("ignore:partition 'acid' gives 50 clients 250 samples:UserWarning")  # as in that recipe
@pytest.mark.parametrize("file", AGAIN)
def test_a_small_part_of_a_recipes_results_comes_out_again(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recipe's own functions: other settings, draws and parts are noticed."""
    module, make = AGAIN[file]
    monkeypatch.syspath_prepend(str(RECIPES / file.partition("/")[0]))
    recipe = importlib.import_module(module)
    stored = importlib.import_module("protocol").read_results
    assert not list(differences(make(recipe, stored(file), tmp_path), stored(file)))
