"""A trained model on new data: names, categories, scales and clients' own numbers mean what they meant in its run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.commands import Cli

import fedloom as fl
from fedloom.experiment.conventions import compare

RUN = ("run", "-q", "method=fedavg", "partition=iid", "clients=3", "model=logistic", "local.lr=.5", "rounds=6")


def accuracy(text: str) -> float:
    return float(text.split("accuracy ")[1].split(",")[0])


@pytest.fixture
def people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """Three classes, two of which are named by digits, by a column in hundreds and a category named by digits."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    code = draw.integers(0, 3, 150)
    x = 100 + 50 * draw.normal(size=150)
    frame = pd.DataFrame({"size": x, "code": np.array(["01", "1", "2x"])[code]})
    frame["label"] = np.where(code == 0, "3", np.where(code == 1, "0", "unrated"))
    frame.to_csv("people.csv", index=False)
    return frame


def test_names_and_categories_that_look_like_numbers(cli: Cli, people: pd.DataFrame) -> None:
    """Rows of a new file may happen to have only such names: they are no numbers."""
    assert cli(*RUN, "data=table:people.csv", "data.standardise=true", "out=done").code == 0
    people[people.label != "unrated"].to_csv("new.csv", index=False)
    answer = cli("predict", "run=done", "new.csv")
    assert set(answer.out.split()) == {"0", "3"}
    assert accuracy(answer.err) == 1
    (target,) = json.loads(cli("target", "run=done", "data=new.csv", "method=target_prior", "--json").out)
    assert target["classes"] == ["0", "3", "unrated"]
    assert sum(target["shares"][:2]) > 0.9
    people.assign(label="7").to_csv("other.csv", index=False)
    assert "there is no class '7'" in cli("predict", "run=done", "other.csv").err


def test_names_with_leading_zeros(cli: Cli, people: pd.DataFrame) -> None:
    people.assign(label=people.label.replace("3", "03")).to_csv("people.csv", index=False)
    assert cli(*RUN, "data=table:people.csv", "data.standardise=true", "out=done").code == 0
    people[people.label == "3"].assign(label="03").to_csv("new.csv", index=False)
    answer = cli("predict", "run=done", "new.csv")
    assert set(answer.out.split()) == {"03"}
    assert accuracy(answer.err) == 1


@pytest.mark.parametrize(
    ("mean", "deviation", "far"), [(5.0, 2.0, False), (5.9, 1.5, False), (6.5, 2.0, True), (5.0, 4.1, True)]
)
def test_data_standardised_by_nearly_the_same_numbers_are_in_the_same_scale(
    mean: float, deviation: float, far: bool
) -> None:
    contract, other_contract = (
        {"standardised": {"columns": [0], "mean": [m], "deviation": [d]}} for m, d in ((5.0, 2.0), (mean, deviation))
    )
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        compare(contract, other_contract, "the teacher")
    assert bool(records) == far


def test_categories_of_numbers_are_names(people: pd.DataFrame) -> None:
    """As in training: in the order that the column has for them."""
    people["label"] = pd.Categorical(people["size"] > 100, categories=[True, False])
    federation = fl.data.federate(people, "iid", clients=3, label="label", standardise=True)
    run = fl.run("fedavg", federation, "logistic", rounds=6, local=fl.Local(lr=0.5))
    model = run.trained.server
    assert model.evaluate(people, people["label"])["accuracy"] > 0.9
    assert model.evaluate(people, people["label"].astype(str).tolist())["accuracy"] > 0.9


def test_columns_named_by_numbers_are_standardised(people: pd.DataFrame) -> None:
    frame = pd.DataFrame({0: people["size"], 1: 1e4 * people["size"] + 5, "label": (people["size"] > 100).astype(int)})
    federation = fl.data.federate(frame, "iid", clients=3, label="label", standardise=True)
    model = fl.run("fedavg", federation, "logistic", rounds=6, local=fl.Local(lr=0.5)).trained.server
    outputs, inputs = model.outputs(frame), model.outputs(frame.drop(columns="label"))
    assert (outputs == inputs).all()
    assert model.evaluate(frame.drop(columns="label"), frame["label"])["accuracy"] > 0.9


@pytest.mark.filterwarnings("ignore:partition 'alid'")
def test_clients_that_number_classes_themselves_have_their_own_names(cli: Cli) -> None:
    source = fl.data.sources.make("digits")
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    x, y = source.train.x.numpy(), source.train.y.numpy()
    np.savez("named.npz", x_train=x, y_train=y, x_test=source.test.x.numpy(), y_test=source.test.y.numpy(), names=names)
    alid = (
        "partition=alid",
        "partition.samples=80",
        "partition.classes=3",
        "held_out=common",
        "partition.test_samples=20",
    )
    assert cli(*RUN[:2], "method=fedper", "data=npz:named.npz", *alid, "clients=4", "rounds=4", "out=done").code == 0
    run = fl.load("done")
    for number in range(4):
        rows = run.federation.held_out.index[number]
        samples = run.federation.held_out.client(number)
        model = run.client(number)
        called = names[run.federation.held_out.arrays.y[rows].numpy()]
        assert model.evaluate(samples.x, called.tolist()) == model.evaluate(samples.x, samples.y)
        assert [model.names[int(y)] for y in samples.y] == called.tolist()


def test_a_number_that_names_another_client_is_told(cli: Cli, people: pd.DataFrame) -> None:
    people["site"] = np.arange(len(people)) % 3 + 1
    people.to_csv("people.csv", index=False)
    words = ("run", "-q", "method=fedper", "data=table:people.csv", "data.client=site", "data.standardise=true")
    assert cli(*words, "rounds=2", "out=done").code == 0
    people.to_csv("new.csv", index=False)
    assert (
        "client '1' is client number 0 of the run; number 1 is named '2'"
        in cli("predict", "run=done", "new.csv", "--client", "1").err
    )
    assert "is client number" not in cli("predict", "run=done", "new.csv", "--client", "0").err


@pytest.mark.filterwarnings("ignore:own data.* hold values up to 255")
def test_bytes_are_scaled_as_the_runs_own_images_were() -> None:
    """Floats from 0 to 255 stay as they are, and so do bytes on a model that learnt from these."""
    source = fl.data.sources.make("digits")
    pixels = (source.train.x * 255).round()
    federation = fl.data.federate((pixels / 64, source.train.y), "iid", clients=3)
    model = fl.run("fedavg", federation, "logistic", rounds=2, local=fl.Local(lr=0.01)).trained.server
    federation_of_bytes = fl.data.federate((pixels, source.train.y), "iid", clients=3)
    wide = fl.run("fedavg", federation_of_bytes, "logistic", rounds=2, local=fl.Local(lr=1e-4)).trained.server
    as_bytes = pixels.numpy().astype(np.uint8)
    assert np.array_equal(wide.outputs(as_bytes), wide.outputs(pixels))
    assert model.outputs(as_bytes).isfinite().all()


@pytest.mark.filterwarnings("default:.*with which models train poorly")  # of the other scale; commands print both
@pytest.mark.filterwarnings("default:.*learnt from inputs in another scale")
@pytest.mark.parametrize("change", ["classes", "columns", "scale", "nothing"])
def test_a_teacher_is_refused_where_classes_or_columns_mean_something_else(
    cli: Cli, people: pd.DataFrame, change: str
) -> None:
    assert cli(*RUN, "data=table:people.csv", "data.standardise=true", "out=teacher").code == 0
    table = people[["code", "size", "label"]] if change == "columns" else people
    table = people.assign(label=people.label.replace("unrated", "1a")) if change == "classes" else table
    table.to_csv("other.csv", index=False)
    scaled = "data.standardise=false" if change == "scale" else "data.standardise=true"
    for command in (("distill", "-q", "method=kd", "epochs=3", "model=logistic"), (*RUN, "method=distill")):
        answer = cli(*command, "data=table:other.csv", scaled, "teacher=teacher", f"out={change}-{command[0]}")
        if change in ("classes", "columns"):
            assert answer.code == 2
            assert f"teacher knows the {change} " in answer.err
        else:
            assert answer.code == 0
            assert ("in another scale" in answer.err) == (change == "scale")
