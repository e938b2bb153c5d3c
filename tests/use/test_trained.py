"""The models of a finished run: those evaluated by the run itself, and those of clients that join later."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.federations import classes
from helpers.marks import KINDS, kinds
from helpers.networks import tanh_net
from helpers.runs import GENTLE, experiment
from torch import Tensor

import fedloom as fl
from fedloom.base.errors import CheckpointError, ConfigError, DataError
from fedloom.config import build, resolve
from fedloom.core.federation import Federation, Index
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate
from fedloom.experiment import passes
from fedloom.experiment.evaluation import Evaluation, Measurement
from fedloom.experiment.federated import RunResult, load, run
from fedloom.methods import make, methods
from fedloom.parts.adaptation import FineTune, Prototypes
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import PrivateHead, Subspace

ONE = 3  # the only client with test samples
CLIENTS = Evaluation(what=("clients",))
ALL = {name: make(name, **GENTLE.get(name, {})) for name in methods.names()}
PREDICTORS = [name for name, method in ALL.items() if method.predicts and method.keeps_private]
MIXED = {
    "head+proto": Method("a", (CrossEntropy(),), personal=PrivateHead(), adaptation=Prototypes()),
    "head+finetune": Method("b", (CrossEntropy(),), personal=PrivateHead(), adaptation=FineTune(steps=2)),
}


def with_tests_at(federation: Federation, client: int) -> Federation:
    """The federation with test samples at one client alone."""
    rows = [federation.held_out.index[k] if k == client else [] for k in range(len(federation))]
    return replace(federation, held_out=replace(federation.held_out, index=Index.of(rows)))


@pytest.mark.parametrize("name", kinds([*PREDICTORS, *MIXED], [*KINDS, *MIXED]))
def test_a_clients_model_is_the_one_that_was_evaluated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs to the last bit, λ, and the recorded accuracy."""
    outputs: list[Tensor] = []
    real = Measurement.predictions

    def spy(self: Measurement, out: Tensor, y: Tensor) -> Any:
        outputs.append(out.clone())
        return real(self, out, y)

    monkeypatch.setattr(Measurement, "predictions", spy)
    monkeypatch.setattr(passes, "stackable", lambda model: False)
    setup = experiment(MIXED.get(name, name), rounds=2, evaluation=CLIENTS)
    client = 0 if setup.method.pooled else ONE
    setup = replace(setup, federation=with_tests_at(setup.federation, ONE))
    result = run(setup)
    out, model = outputs[-1], result.trained.client(client)
    test = setup.federation.held_out.client(ONE)
    if isinstance(setup.method.personal, Subspace):  # the sweep over λ is measured in one go
        assert model.lam == 0.5
        out = out.unflatten(0, (11, -1))[5]
    assert torch.equal(model.outputs(test.x), out)
    right = float((model.predict(test.x) == test.y).double().mean())
    final = result.history[-1]
    assert right == final["clients/accuracy/mean"] == model.evaluate(test.x, test.y)["accuracy"]
    loss = model.measurement.loss_name
    assert model.evaluate(test.x, test.y)[loss] == pytest.approx(final[f"clients/{loss}/mean"], rel=1e-12)


@pytest.mark.parametrize("name", ["fedrep", "ditto", "superfed_mm", "per_fedavg", "heterofl", "head+proto"])
def test_all_clients_of_a_stored_run(name: str, tmp_path: Path) -> None:
    """What ``clients.parquet`` says of the last round, from models loaded from the run directory."""
    federation = classes()
    federation = replace(federation, validation=federation.held_out)
    method = make(name, min_validation=1) if name == "superfed_mm" else MIXED.get(name, name)
    setup = experiment(method, federation=federation, cohort=4, evaluation=CLIENTS)
    run(setup, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    models = load(setup, tmp_path / "run")
    table = pd.read_parquet(tmp_path / "run" / "clients.parquet")
    last = table[table["round"] == 3].set_index("client")
    assert len(last) == len(federation)
    for client, row in last.iterrows():
        model, test = models.client(int(client)), federation.held_out.client(int(client))
        metrics = model.evaluate(test.x, test.y)
        assert metrics["accuracy"] == row["accuracy"]
        assert metrics["loss"] == pytest.approx(row["loss"], rel=1e-12)
        assert "lambda" not in row or model.lam == row["lambda"]
        assert model.lam is None or type(model.lam) is float
    assert list(models.history["round"]) == [1, 2, 3]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


def test_the_servers_model_is_the_one_that_was_evaluated() -> None:
    result = run(experiment("scaffold", evaluation=Evaluation(what=("global",))))
    test, server = result.trained.federation.test, result.trained.server
    assert server.evaluate(test.x, test.y)["accuracy"] == result.history[-1]["global/accuracy"]
    assert torch.equal(server.outputs(test.x), result.model(test.x))


def test_models_are_independent_of_each_other() -> None:
    models = run(experiment("fedper")).trained
    x = models.federation.test.x
    first = models.client(0)
    before = first.outputs(x)
    second = models.client(1)
    with torch.no_grad():
        for parameter in second.module.parameters():
            parameter.zero_()
    assert torch.equal(first.outputs(x), before)
    assert torch.equal(models.client(0).outputs(x), before)


def train(method: Method | str = "fedper", **changes: Any) -> RunResult:
    return run(experiment(method, **{"local": Local(epochs=3, batch_size=0, lr=0.3, lr_decay=0.9), **changes}))


def test_a_new_client_trains_its_private_parameters_by_the_method() -> None:
    """FedPer by hand: the body and the initial head take the steps of two rounds; the trained head is kept."""
    result = train()
    draw = np.random.default_rng(1)
    x, y = torch.tensor(draw.normal(size=(11, 4))), torch.tensor(draw.integers(3, size=11))
    server, start = copy.deepcopy(result.model), tanh_net().double()
    by_hand = copy.deepcopy(server)
    by_hand.head.load_state_dict(start.head.state_dict())  # type: ignore[union-attr]
    for t in (3, 4):
        body = copy.deepcopy(server.body.state_dict())  # type: ignore[union-attr]
        by_hand.body.load_state_dict(body)  # type: ignore[union-attr]
        by_hand.train()
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(by_hand(x), y)
            for p, g in zip(by_hand.parameters(), torch.autograd.grad(loss, [*by_hand.parameters()]), strict=True):
                p.data -= 0.3 * 0.9**t * g
    by_hand.body.load_state_dict(server.body.state_dict())  # type: ignore[union-attr]
    before = result.snapshot.server.theta.clone()
    torch.testing.assert_close(result.trained.adapt(x, y, rounds=2).outputs(x), by_hand(x).detach())
    assert torch.equal(result.snapshot.server.theta, before)


def test_where_no_model_outlives_a_round_the_data_are_named() -> None:
    models, data = train("fedevg").trained, classes().train.client(0)
    for model in (lambda: models.server, lambda: models.client(0), lambda: models.adapt(data.x, data.y)):
        with pytest.raises(ConfigError, match=r"no model outlives a round; .* data=generated:DIR/synthetic\.npz"):
            model()


@pytest.mark.parametrize(
    "name", ["fedavg", "fedper", "local", "ditto", "superfed_mm", "per_fedavg", "fedrod", "heterofl"]
)
def test_a_new_client_gets_a_model(name: str) -> None:
    result = train(name)
    data = result.trained.federation.train.client(2)
    model = result.trained.adapt(data.x.numpy(), data.y.numpy())
    metrics = model.evaluate(data.x, data.y)
    loss = "cross_entropy" if name == "fedrod" else "loss"
    assert set(metrics) == {loss, "accuracy"}
    if name == "fedavg":
        assert torch.equal(model.outputs(data.x), result.trained.server.outputs(data.x))
    if name in ("fedper", "local", "ditto"):
        fresh = result.trained.adapt(data.x, data.y, rounds=1).evaluate(data.x, data.y)
        assert metrics[loss] < fresh[loss]


def test_wrong_arguments_end_in_one_sentence(tmp_path: Path) -> None:
    result = train()
    use, x, y = result.trained, torch.zeros(2, 4), torch.zeros(2)
    for call, error, sentence in [
        (lambda: use.client(6), ConfigError, "there is no client 6; clients have the numbers 0 to 5"),
        (lambda: use.client(True), ConfigError, "there is no client True"),
        (lambda: use.client("7"), ConfigError, "there is no client '7'"),
        (lambda: use.server, ConfigError, "the server has no whole model; use that of a client"),
        (lambda: use.adapt(x, y, rounds=0), ConfigError, "rounds is 0"),
        (lambda: use.client(0).predict("x"), DataError, "x holds text"),
        (lambda: use.client(0).predict(x[0]), DataError, r"shape \[4\], .* takes \[N, 4\] \(one sample needs"),
        (lambda: use.client(0).predict(x / 0), DataError, "some inputs are NaN or infinite"),
        (lambda: use.client(0).evaluate(x, y[:1]), DataError, r"targets have shape \[1\], not \[2\]"),
        (lambda: use.client(0).evaluate(x, y + 0.5), DataError, "the targets are real numbers"),
        (lambda: use.client(0).evaluate(x, y + 3), DataError, "label 3, but there are 3 classes"),
        (lambda: fl.load(tmp_path), CheckpointError, "is not a run directory"),
        (lambda: use.client(0).predict([[1], [1, 2]]), DataError, "x holds arrays of different shapes"),
        (lambda: fl.run("fedavg", [1], "mlp"), ConfigError, "federation is a list of 1; make one"),  # type: ignore[arg-type]
        (lambda: fl.run(3, use.federation, "mlp"), ConfigError, "the method is 3"),  # type: ignore[arg-type]
        (lambda: fl.run("fedavg", use.federation, 3), ConfigError, "the model is 3"),  # type: ignore[arg-type]
        (lambda: fl.run("fedavg", use.federation, "mlp", round=3), ConfigError, "no argument 'round'; did you mean"),
    ]:  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()


@pytest.mark.parametrize("changes", [{"compute": "live"}, {"compute_settings": {"shares": 1}}])
def test_a_run_is_loaded_however_its_clients_would_be_stepped_now(changes: dict[str, Any], tmp_path: Path) -> None:
    """With compute=auto that depends on the version, and models remain what they are."""
    result = run(experiment(compute="batched", rounds=1), tmp_path / "run")
    again = load(experiment(**({"compute": "batched"} | changes), rounds=1), tmp_path / "run")
    assert torch.equal(again.snapshot.server.theta, result.snapshot.server.theta)


def test_a_run_from_python_is_loaded_with_its_arguments(tmp_path: Path) -> None:
    federation = fl.data.federate("digits", "iid", clients=3)
    settings = {"rounds": 1, "local": Local(lr=0.05)}
    result = fl.run("fedper", federation, "mlp", out=tmp_path / "run", **settings)
    with pytest.raises(ConfigError, match=r"was started from Python, .*; use it there, with the same arguments as run"):
        fl.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"is not a run of this experiment: local.lr: 0.05 → 0.1"):
        fl.load(tmp_path / "run", "fedper", federation, "mlp")
    again = fl.load(tmp_path / "run", "fedper", federation, "mlp", **settings)
    x = federation.held_out.client(1).x
    assert torch.equal(again.client(1).outputs(x), result.trained.client(1).outputs(x))
    assert {**result.summary, "checksums": again.summary["checksums"]} == again.summary


def test_pixels_are_scaled_as_the_runs_images() -> None:
    federation = fl.data.federate("digits", "iid", clients=2)
    model = fl.run("fedavg", federation, "logistic", rounds=1).trained.server
    pixels = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8)
    arrays = federation.train.arrays
    mean, std = arrays.mean or (0.0,), arrays.std or (1.0,)
    torch.testing.assert_close(model.inputs(pixels), (pixels.float() / 255 - mean[0]) / std[0])
    torch.testing.assert_close(model.inputs(pixels.numpy()[:, 0]), model.inputs(pixels))


def test_predictions_have_the_form_of_the_targets() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 4)).astype(np.float32)
    labels, real = (x[:, :2] > 0).astype(np.float32), x[:, :2] @ np.array([1, 2], np.float32)
    for y, loss in [
        (labels[:, 0].astype(np.int64), "binary_cross_entropy"),
        (labels, "binary_cross_entropy"),
        (real, "squared_error"),
    ]:
        federation = fl.data.federate((x, y), "iid", clients=3)
        model = fl.run("fedavg", federation, "logistic", rounds=1, loss=loss).trained.client(1)
        test = federation.held_out.client(1)
        predictions, out = model.predict(test.x), model.outputs(test.x)
        assert predictions.shape == test.y.shape
        if loss == "squared_error":
            assert torch.equal(predictions, out.reshape(predictions.shape))
        else:
            assert torch.equal(predictions, (out.reshape(predictions.shape).sigmoid() > 0.5).to(torch.int64))
            right = float((predictions == test.y).double().mean())
            assert model.evaluate(test.x, test.y)["accuracy"] == pytest.approx(right)


def test_a_module_is_a_model_and_the_start_of_the_run() -> None:
    federation = fl.data.federate("digits", "iid", clients=2)
    net = fl.wrap(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), head="1")
    result = fl.run("fedavg", federation, net, rounds=1, local=Local(steps=1, lr=1e-12))
    torch.testing.assert_close(result.model(federation.test.x), net(federation.test.x))
    with pytest.raises(ConfigError, match="pass a function that makes a module"):
        fl.run("superfed_mm", federation, net, rounds=1)


def people(rows: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    table = pd.DataFrame({"age": draw.normal(size=rows), "sex": draw.choice(["f", "m"], rows)})
    table["bmi"] = draw.normal(size=rows)
    table["ill"] = np.where(table["age"] + (table["sex"] == "m") > 0.5, "yes", "no")
    return table.assign(town=draw.choice(["north", "south"], rows))


def test_columns_of_a_table_and_names_of_classes_are_found_by_name(tmp_path: Path) -> None:
    table, new = people(80, 0), people(30, 1)
    federation = federate(table, label="ill", client="town")
    models = fl.run("fedper", federation, "mlp", rounds=3).trained
    model, x = models.client("north"), new[["age", "sex", "bmi"]]
    coded = np.column_stack([x["age"], x["sex"] == "f", x["sex"] == "m", x["bmi"]]).astype(np.float32)
    expected = model.predict(coded)
    assert 0 < expected.sum() < len(expected)
    for inputs in (x, x[["bmi", "sex", "age"]], new, pd.DataFrame(coded)):
        assert torch.equal(model.predict(inputs), expected)
    numbers = (new["ill"] == "yes").astype(int)
    metrics = model.evaluate(new, new["ill"])
    assert metrics == model.evaluate(coded, numbers.to_numpy())
    assert metrics["accuracy"] == pytest.approx((expected.numpy() == numbers).mean())
    assert torch.equal(models.adapt(new, new["ill"], 2).outputs(x), models.adapt(coded, numbers, 2).outputs(coded))
    for inputs, sentence in [
        (x.drop(columns="bmi"), "the inputs have no column 'bmi'; there are: age, sex"),
        (x.drop(columns="sex"), "the inputs have no column 'sex=f'"),
        (x.assign(sex="x"), "column 'sex' of the inputs holds 'x', which the run's data do not; there are: f, m"),
        (
            x.assign(age="old"),
            "column 'age' of the inputs holds values that are not numbers: could not",
        ),
        (x.assign(bmi=np.nan), "column 'bmi' of the inputs has missing values in 30 of 30 rows"),
        (x.assign(bmi=np.inf), "NaN or infinite"),
    ]:
        with pytest.raises(DataError, match=sentence):
            model.predict(inputs)
    with pytest.raises(DataError, match="there is no class 'maybe'; there are: no, yes"):
        model.evaluate(new, ["maybe"] * len(new))
    table.to_csv(tmp_path / "people.csv", index=False)
    words = [f"data=table:{tmp_path}/people.csv", "data.label=ill", "data.client=town", "rounds=1", "model=mlp"]
    loaded = fl.run(build(resolve(["method=fedavg", *words]))).trained.server
    assert torch.equal(loaded.predict(x[["bmi", "sex", "age"]]), loaded.predict(coded))


def test_what_was_said_of_the_data_is_not_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["age,ill,town", *(f"{20 + 7 * row % 60},{row % 2},{row % 3}" for row in range(60))]
    Path("people.csv").write_text("\n".join(rows))
    words = ("data=table:people.csv", "data.label=ill", "data.client=town", "model=logistic", "rounds=1", "out=run")
    with pytest.warns(UserWarning, match="with which models train poorly"):
        run(build(resolve(words)), tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fl.load("run").server.predict([[30.0]]).shape == (1,)
