"""``fedloom predict`` and ``fedloom export`` on a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.commands import Cli
from helpers.reviews import reviews
from safetensors.torch import load_file

import fedloom as fl
from fedloom.base import yaml
from fedloom_apps.customise.command import as_text, measure, print_metrics
from fedloom_apps.customise.label_shift import LabelShiftCheck, TargetPrior
from fedloom_apps.customise.model import TargetFacts, TargetModel

READ = (
    "data=text:reviews.csv", "data.text=review", "data.label=said", "data.client=user", "data.words=300",
    "data.length=8", "model=stacked_lstm", "model.hidden=16", "model.layers=1", "local.lr=2", "local.clip=1",
)  # fmt: skip
SMALL = ("clients=5", "model.hidden=[8]", "local.batch_size=50", "rounds=2")


@pytest.fixture
def finished(cli: Cli) -> fl.TrainedRun:
    assert cli("run", "-q", "method=fedper", "out=done", *SMALL).code == 0
    return fl.load("done")


def test_predict_and_export(cli: Cli, finished: fl.TrainedRun) -> None:
    test = finished.federation.held_out.client(3)
    np.savez("test.npz", x=test.x.numpy(), y=test.y.numpy())
    np.save("inputs.npy", test.x.numpy())
    expected = finished.client(3).predict(test.x)
    answer = cli("predict", "run=done", "test.npz", "--client", "3")
    assert [int(line) for line in answer.out.split()] == expected.tolist()
    accuracy = float((expected == test.y).double().mean())
    assert f"{len(expected)} samples: loss " in answer.err
    assert f"accuracy {accuracy:.4g}" in answer.err
    assert cli("predict", "run=done", "inputs.npy", "--client", "3", "--out", "new/p.npz").code == 0
    assert np.load("new/p.npz")["prediction"].tolist() == expected.tolist()
    assert cli("predict", "run=done", "inputs.npy", "--client", "3", "--out", "p.csv").code == 0
    assert Path("p.csv").read_text().split()[1:] == answer.out.split()
    assert "exists" not in cli("predict", "run=done", "inputs.npy", "--client", "3", "--out", "p.csv").out
    answer = cli("export", "run=done", "--client", "3")
    assert answer.out == "safetensors: done-client-3.safetensors\n"
    stored = load_file("done-client-3.safetensors")
    assert all(torch.equal(v, stored[k]) for k, v in finished.client(3).module.state_dict().items())


def test_mistakes_are_sentences(cli: Cli, finished: fl.TrainedRun) -> None:
    np.savez("z.npz", z=np.zeros(3))
    np.save("flat.npy", np.zeros((3, 5)))
    np.savez("few.npz", x=finished.federation.test.x[:3].numpy(), y=np.zeros(2, dtype=np.int64))
    answer = cli("predict", "run=done", "few.npz", "--client", "0")
    assert (answer.code, answer.out, "the targets have shape [2], not [3]" in answer.err) == (2, "", True)
    for words, sentence in [
        (("predict", "run=done", "z.npz", "--client", "0"), "z.npz lacks x; it holds z."),
        (("predict", "run=done", "flat.npy", "--client", "0"), "the inputs have shape [3, 5], but this model takes"),
        (("predict", "run=done", "flat.npy"), "the server has no whole model"),
        (("export", "run=done", "--client", "9"), "there is no client 9"),
    ]:
        code, out, err = cli(*words)
        assert (code, out) == (2, "")
        assert sentence in err
        assert err.count("\n") == 1


def test_models_for_targets(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two targets from one run: shares, clients, check and a file for each, which the run's own model can load."""
    small = ("clients=5", "partition=niid1", "partition.order=true", "model=mlp", "local.epochs=3", "rounds=3")
    assert cli("run", "-q", "method=fedavg", "out=done", *small).code == 0
    run = fl.load("done")
    for name, classes in (("low", [0, 1]), ("high", [8, 9])):
        test = run.federation.test
        rows = np.flatnonzero(np.isin(test.y.numpy(), classes))
        np.savez(f"{name}.npz", x=test.x[rows].numpy(), y=test.y[rows].numpy())
    np.save("other.npy", run.federation.test.x.numpy()[:40])
    code, out, err = cli("target", "run=done", "data=low.npz", "data=high.npz")
    assert code == 0
    first, second = out.split("target: high.npz")
    assert "class shares (95 % intervals over draws of the inputs):" in first
    assert "the training samples of these classes come from client 0: " in first
    assert "the training samples of these classes come from client 4: " in second
    assert out.count("check of label shift: distance to the nearest class") == 2
    assert "model: done-high.safetensors" in second
    assert err.count("this model: loss") == err.count("server's model: loss") == 2
    module = run.server.module
    module.load_state_dict(load_file("done-low.safetensors"))
    assert cli("target", "run=done", "data=other.npy", "--out", "mine.safetensors").err == ""
    Path("cut.npz").write_bytes(Path("low.npz").read_bytes()[:200])
    Path("x.csv").write_text("1,2\n")
    for name, sentence in [
        ("cut.npz", "cut.npz is truncated or not an npz file of plain arrays (File is not a zip file)."),
        ("x.csv", "the run's data were not a table; give inputs x in an .npz file, or an .npy file of them."),
    ]:
        err = cli("target", "run=done", f"data={name}").err
        assert err.startswith("fedloom: ")
        assert err.endswith(f"{sentence}\n")
    assert "it is a folder of them; name one, like done" in cli("target", "run=.", "data=low.npz").err
    assert "exists already" in cli("target", "run=done", "data=other.npy", "--out", "mine.safetensors").err
    assert cli("run", "-q", "method=fedavg", "out=kept", *small, "evaluation.what=[global,average]").code == 0
    code, out, _ = cli("target", "run=kept", "data=low.npz", "method=target_fit")
    assert code == 0
    assert "weights of the clients' models: client 0: " in out
    monkeypatch.setenv("HOME", str(Path().resolve()))
    code, out, _ = cli("target", "run=kept", "data=~/high.npz", "method=target_prior", "method.resamples=20", "--json")
    (target,) = json.loads(out)
    assert code == 0
    assert (target["model"], target["p"], int(np.argmax(target["known"]))) == (None, None, 4)
    assert sum(target["shares"]) == pytest.approx(1)
    assert list(target["measured"]) == ["server's model"]  # there is no other
    assert not Path("kept-high.safetensors").exists()
    assert cli("target", "run=kept", "data=low.npz", "method=target_head", "method.steps=3").err == (
        "fedloom: method for a target 'target_head' has no setting 'steps'; there are: resamples, seed.\n"
    )
    for method in ("target_fit", "target_head", "target_prior"):
        assert f"take fedloom target run=DIR data=FILE method={method}" in cli("run", f"method={method}").err
    ssa = ("method=fedssa", "method.variance=10", "method.views=[blur]", "method.steps=50", "--out", "ssa.safetensors")
    code, out, _ = cli("target", "run=kept", "data=low.npz", *ssa)
    assert code == 0
    assert "weights of the clients' models: client " in out
    assert cli("list", "target_fit").out.startswith("method=target_fit")


def test_the_loss_on_a_class_that_a_target_does_not_have_is_infinite(
    cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head gives such a class a logit of -1e30, and the loss would be told as 1e29."""
    words = ("out=done", "clients=5", "model.hidden=[8]", "rounds=2", "evaluation.metrics=[accuracy,auroc]")
    assert cli("run", "-q", "method=fedavg", *words).code == 0
    run = fl.load("done")
    head = fl.target.ClassModels(run).head(torch.tensor([0.0, *[1 / 9] * 9], dtype=torch.float64))
    x, y = run.federation.test.x, run.federation.test.y
    metrics = [measure(head, x, y), measure(head, x[y > 0], y[y > 0]), measure(run.server, x, y)]
    assert [values["loss"] is None for values in metrics] == [True, False, False]
    assert [*measure(head, x[y == 1], y[y == 1])] == ["loss", "accuracy"]  # one class alone has no area under a curve
    print_metrics({"this model": metrics[0]})
    assert "loss infinite, as some inputs are of a class with an estimated share of 0, acc" in capsys.readouterr().err


def test_classes_whose_names_cannot_be_printed_are_numbers(cli: Cli) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2
    np.savez("own.npz", x_train=x, y_train=y, names=np.array(["tab\t", "line\n"]))
    np.save("x.npy", x[:4])
    words = ("data=npz:own.npz", "partition=iid", "clients=3", "model=logistic", "rounds=1", "out=done")
    assert cli("run", "-q", "method=fedavg", *words).code == 0
    assert fl.load("done").server.names == ("tab\t", "line\n")
    assert set(cli("predict", "run=done", "x.npy").out.split()) <= {"0", "1"}


def test_a_model_for_all_classes_alike_is_told_as_json(cli: Cli) -> None:
    assert cli("run", "-q", "method=fedavg", "out=done", *SMALL).code == 0
    code, out, err = cli("target", "run=done", "method=ccvr", "method.epochs=1", "--json")
    (target,) = json.loads(out)
    assert (code, err, target["model"], target["privacy"]) == (0, "", "done-ccvr.safetensors", None)
    assert load_file(target["model"]).keys() == fl.load("done").server.module.state_dict().keys()
    _, out, err = cli("target", "run=done", "method=ccvr", "method.epochs=1", "--out", "again.safetensors")
    assert out == "model: again.safetensors\n"
    accuracies = [numbers["accuracy"] for numbers in target["measured"].values()]
    assert [*target["measured"]] == ["server's model", "this model"]
    assert [f"accuracy {value:.4g}" in line for value, line in zip(accuracies, err.splitlines(), strict=True)] == [
        True
    ] * 2


def test_a_target_of_a_table_is_told_in_its_own_names(cli: Cli) -> None:
    """Natural clients without a common test set keep their last models, too, and test their mean themselves."""
    draw, y = np.random.default_rng(0), np.repeat([0, 1, 2], 60)
    rows = 3 * np.eye(3)[y] + draw.normal(size=(180, 3))
    table = pd.DataFrame(rows, columns=["a", "b", "c"])
    table["risk"], table["clinic"] = np.array(["high", "low", "mid"])[y], np.array(["north", "south"])[(y > 0) * 1]
    table.to_csv("visits.csv", index=False)
    np.savez("buyer.npz", x=rows[y == 1].astype(np.float32))
    words = (
        "data=table:visits.csv",
        "data.label=risk",
        "data.client=clinic",
        "model=mlp",
        "local.epochs=5",
        "rounds=3",
    )
    assert cli("run", "-q", "method=fedavg", "out=done", *words, "evaluation.what=[clients,average]").code == 0
    assert 0 <= fl.load("done").history["average/accuracy/mean"].iloc[-1] <= 1
    code, out, _ = cli("target", "run=done", "data=buyer.npz", "method=target_fit")
    assert code == 0
    assert out.splitlines()[2].startswith("  low: ")
    assert "the training samples of these classes come from south: 1" in out
    code, out, err = cli("target", "run=done", "data=buyer.npz", "method=fedssa", "--out", "mixed.safetensors")
    assert (code, out) == (2, "")
    assert err == (
        "fedloom: fedssa compares augmented views of images, but this run's inputs have shape [3]; "
        "choose target_head, target_fit or ccvr.\n"
    )
    (target,) = json.loads(cli("target", "run=done", "data=buyer.npz", "method=target_prior", "--json").out)
    assert target["classes"][int(np.argmax(target["shares"]))] == "low"


def test_tables_are_read_as_the_runs_own_table_was(cli: Cli, finished: fl.TrainedRun) -> None:
    """Columns by name, in the units of the run's table, whose label column may be there or not."""
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"age": draw.integers(18, 90, 300), "sex": draw.choice(["f", "m"], 300)})
    table["ill"] = np.where(table["age"] + 10 * (table["sex"] == "m") > 60, "yes", "no")
    table.assign(town=np.arange(300) % 3).to_csv("people.csv", index=False)
    new = table.iloc[:50]
    new.to_csv("new.csv", index=False)
    new[["sex", "age"]].to_parquet("new.parquet")
    words = ("data=table:people.csv", "data.label=ill", "data.client=town", "data.standardise=true", "model=mlp")
    assert cli("run", "-q", "method=fedavg", "out=run", *words, "rounds=10").code == 0
    run = fl.load("run")
    numbers = run.federation.provenance["source"]["standardised"]
    scaled = (new["age"] - numbers["mean"][0]) / numbers["deviation"][0]
    coded = np.column_stack([scaled, new["sex"] == "f", new["sex"] == "m"]).astype(np.float32)
    expected = run.server.predict(coded)
    assert 0 < expected.sum() < len(expected)
    labels = [run.server.names[number] for number in expected]
    assert set(labels) == {"no", "yes"}
    code, out, err = cli("predict", "run=run", "new.csv")
    assert (code, out.split()) == (0, labels)
    assert f"accuracy {run.server.evaluate(coded, new['ill'])['accuracy']:.4g}" in err
    code, out, err = cli("predict", "run=run", "new.parquet")
    assert (code, out.split(), err) == (0, labels, "")
    for out in ("p.csv", "p.npz"):
        assert cli("predict", "run=run", "new.csv", "--out", out).code == 0
    assert Path("p.csv").read_text().split() == ["prediction", *labels]
    stored = np.load("p.npz")
    assert stored["names"][stored["prediction"]].tolist() == labels
    (by_csv,), (by_parquet,) = (
        json.loads(cli("target", "run=run", f"data=new.{end}", "method=target_prior", "--json").out)
        for end in ("csv", "parquet")
    )
    assert by_csv["shares"] == by_parquet["shares"]
    assert set(by_csv["measured"]) == {"server's model"}
    assert not by_parquet["measured"]
    code, _, err = cli("predict", "run=done", "new.csv", "--client", "0")
    assert code == 2
    assert "the run's data were not a table" in err


def test_a_table_may_have_several_target_columns(cli: Cli) -> None:
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"age": draw.normal(size=60), "sex": draw.choice(["f", "m"], 60)})
    table["height"], table["weight"] = table["age"] + 1, 1e6 - 2 * table["age"]
    table.to_csv("people.csv", index=False)
    words = ("data=table:people.csv", "data.label=[height,weight]", "partition=iid", "clients=2", "model=mlp")
    fit = ("run", "-q", "method=fedavg", "method.objective=[squared_error]", "rounds=2", "out=run")
    assert cli(*fit, *words).code == 0
    assert fl.load("run").federation.train.arrays.y.shape[1] == 2
    code, out, err = cli("predict", "run=run", "people.csv")
    assert (code, len(out.splitlines()), len(out.split())) == (0, 60, 120)
    metrics = fl.load("run").server.evaluate(table[["age", "sex"]], table[["height", "weight"]])
    assert f"rmse {metrics['rmse']:.4g}" in err
    predictions = fl.load("run").server.predict(table[["age", "sex"]]).numpy()
    assert np.array_equal(np.array(out.split(), dtype=np.float32).reshape(60, 2), predictions)  # with all digits
    table.drop(columns="weight").to_csv("some.csv", index=False)
    assert cli("predict", "run=run", "some.csv")[1:] == (out, "")  # without all targets, predictions alone
    for column in ("age", "sex"):
        table.assign(**{column: table[column].mask(table.index == 3)}).to_csv("lacking.csv", index=False)
        code, _, err = cli("predict", "run=run", "lacking.csv")
        assert code == 2
        assert (
            f"column '{column}' of the inputs has missing values in 1 of 60 rows; fill them, or drop those rows." in err
        )


@pytest.mark.parametrize(("p", "warned"), [([0.9, 0.1, 0.0], True), ([0.2, 0.8, 0.0], False), ([0.0, 1.0, 0.0], False)])
def test_weights_of_clients_that_know_little_of_a_target_are_a_warning(p: list[float], warned: bool) -> None:
    """As FedSSA's may be, which judges clients by how certain they are."""
    prior = TargetPrior(np.array([1.0, 0.0]), np.ones(2), np.ones(2), 0.95)
    for knowledge in ([0.0, 1.0, 0.0], [np.nan] * 3):
        facts = TargetFacts(prior, np.array(knowledge), LabelShiftCheck(1.0, 1.0, 0.5, 30))
        text = as_text(TargetModel(None, lambda facts=facts: facts, np.array(p)), 30)  # type: ignore[arg-type, misc]
        assert ("favour clients that know little" in text) == (warned and knowledge[0] == 0)


def test_reviews_from_the_command_line_to_predictions(cli: Cli) -> None:
    frame = reviews()
    frame.to_csv("reviews.csv", index=False)
    code, _, err = cli("run", "-q", "method=fedavg", *READ)
    assert code == 2
    assert "give the model a vocabulary of 300, model.vocabulary=300" in err
    assert cli("run", "-q", "method=fedavg", *READ, "model.vocabulary=300", "rounds=25", "out=run").code == 0
    model = fl.load("run").server
    texts = ["the film was lovely and great", "AWFUL; we saw it"]
    assert [model.names[number] for number in model.predict(texts)] == ["yes", "no"]
    assert torch.equal(model.predict(np.array(texts)), model.predict(pd.DataFrame({"review": texts})))
    frame[["said", "review"]].to_csv("new.csv", index=False)
    code, out, err = cli("predict", "run=run", "new.csv")
    assert (code, len(out.split())) == (0, len(frame))
    assert float(err.rpartition("accuracy ")[2]) == pytest.approx(
        np.mean(np.array(out.split()) == frame.said), abs=1e-3
    )
    for columns, sentence in (
        ({"review": "text"}, "the table of inputs has no column 'review'"),
        ({"said": "review", "review": "other"}, ""),
    ):
        frame.rename(columns=columns).to_csv("other.csv", index=False)
        code, _, err = cli("predict", "run=run", "other.csv")
        assert (code == 2, sentence in err) == (bool(sentence), True), err


def test_a_run_of_a_file_is_used_from_any_folder(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    rows = [f"{k % 7},{k % 5},{k % 2}" for k in range(60)]
    Path("mine.csv").write_text("\n".join(["a,b,label", *rows]))
    words = ("data=table:mine.csv", "partition=iid", "clients=3", "model=logistic", "rounds=1")
    assert cli("run", "method=fedavg", *words, "out=run")[0] == 0
    run, file = Path("run").resolve(), Path("mine.csv").resolve()
    assert yaml.load(run / "config.yaml")["data"]["path"] == str(file)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for words in (("predict", f"run={run}", str(file)), ("run", f"resume={run}", "rounds=2"), ("export", f"run={run}")):
        code, _, err = cli(*words)
        assert code == 0, err


def test_metrics_without_a_value_are_null_in_json(cli: Cli) -> None:
    words = ("method=fedavg", "partition=pathological", "partition.classes=1", "clients=10", "rounds=1", "out=done")
    assert cli("run", "-q", "model=logistic", *words).code == 0
    answer = cli("evaluate", "run=done", "evaluation.metrics=[accuracy,auroc]", "--json")
    assert json.loads(answer.out, parse_constant=pytest.fail)["clients/auroc/mean"] is None  # of one class each
