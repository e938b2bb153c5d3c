"""Samples of any structure that a user's collate puts together: boxes, graphs, two modalities, in one run each."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_state
from torch import Tensor, nn

import fedloom as fl
from fedloom.base.errors import ConfigError, DataError
from fedloom.core.federation import Federation
from fedloom.core.samples import Samples
from fedloom.models import models

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {"boxes": r"^(0\.9|1\.0)", "graphs": r"^0\.[89]", "image_and_text": r"^(0\.9|1\.0)"}
LOCAL = fl.Local(batch_size=5, lr=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PRINTED)
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / f"{name}.py"
    assert len([line for line in script.read_text(encoding="utf-8").splitlines() if line]) <= 40
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert re.search(PRINTED[name], capsys.readouterr().out)


def bags(count: int) -> list[tuple[Tensor, Tensor]]:
    """Bags of one to four numbers, each with the numbers that are greater than 0."""
    draw = np.random.default_rng(0)
    numbers = [torch.tensor(draw.normal(size=draw.integers(1, 5))) for _ in range(count)]
    return [(bag, bag[bag > 0]) for bag in numbers]


def collate_pairs(samples: list[Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    numbers = [bag for bag, _ in samples]
    owner = torch.arange(len(numbers)).repeat_interleave(torch.tensor([len(bag) for bag in numbers]))
    return {"numbers": torch.cat(numbers)[:, None], "owner": owner}, [target for _, target in samples]


def collate_inputs(samples: list[Tensor]) -> dict[str, Tensor]:
    return collate_pairs([(bag, bag) for bag in samples])[0]


class Sums(nn.Module):
    """Features of each number, summed over the bag; ``count`` outputs."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(1, 4), nn.Linear(4, count)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        h = self.layer(x["numbers"]).relu()
        return self.head(h.new_zeros(int(x["owner"].max()) + 1, 4).index_add(0, x["owner"], h))


class Dicts(Sums):
    """The same outputs under a name."""

    def forward(self, x: dict[str, Tensor]) -> Any:
        return {"sum": super().forward(x)[:, 0]}


def squared(out: Any, y: list[Tensor]) -> Tensor:
    return (out["sum"] - torch.stack([target.sum() for target in y])).square()


def structures(clients: int = 4) -> Federation:
    return fl.data.federate(bags(48), "iid", clients=clients, collate=collate_pairs)


def labelled_federation(partition: str = "dirichlet") -> Federation:
    samples = [bag for bag, _ in bags(60)]
    return fl.data.federate(samples, partition, clients=4, y=[len(bag) > 2 for bag in samples], collate=collate_inputs)


def play(method: str = "fedavg", federation: Federation | None = None, **settings: Any) -> Any:
    conditions: dict[str, Any] = {"rounds": 2, "local": LOCAL, "seed": 3} | settings
    if federation is None:
        return fl.run(method, structures(), Dicts, loss=squared, **conditions)
    return fl.run(method, federation, lambda: Sums(2), **conditions)


@pytest.mark.parametrize(
    "method",
    ["fedavg", "superfed_mm", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("scaffold", "fedper"))],
)
def test_structures_are_samples_like_others(method: str) -> None:
    """The same bits in processes; the recorded loss is that of each sample by itself, on the client's own model."""
    result = play(method, engine="serial")
    assert_same_state(result.snapshot, play(method, engine="processes", engine_settings={"workers": 2}).snapshot, 0)
    samples = result.trained.federation.held_out.client(1)
    model = result.trained.client(1)
    losses = [
        squared(model.module(x), y) for x, y in (samples.batch(torch.tensor([row])) for row in range(len(samples)))
    ]
    assert model.evaluate(samples.x.items)["loss"] == pytest.approx(float(torch.cat(losses).detach().mean()), abs=1e-6)
    assert [out["sum"].shape for out in model.predict(samples.x.items)] == [(1,)] * len(samples)
    final = result.summary["final"]
    assert final["clients/loss/mean"] > 0
    assert "clients/accuracy/mean" not in final


def test_a_step_on_collated_samples_is_that_of_padded_rows() -> None:
    """θ - η ∇ of the mean loss of the client's samples, by autograd on the module itself."""
    run = play(federation=None, rounds=1, local=fl.Local(batch_size=0, lr=0.1), participation=1.0)
    federation, models = structures(), []
    start = play(rounds=0).trained.server.module.state_dict()
    for client in range(4):
        module = Dicts()
        module.load_state_dict(start)
        x, y = federation.train.batch(torch.from_numpy(federation.train.index[client]), client)
        grads = torch.autograd.grad(squared(module(x), y).mean(), list(module.parameters()))
        models.append([p - 0.1 * g for p, g in zip(module.parameters(), grads, strict=True)])
    sizes = torch.tensor(federation.train.index.sizes / federation.train.index.sizes.sum(), dtype=torch.float32)
    for parameter, parts in zip(run.trained.server.module.parameters(), zip(*models, strict=True), strict=True):
        expected = sum(size * part for size, part in zip(sizes, parts, strict=True))
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)


def test_a_run_of_structures_goes_on_and_is_loaded(tmp_path: Path) -> None:
    full_run = play(rounds=4)
    play(rounds=2, out=tmp_path / "run")
    again = play(rounds=4, out=tmp_path / "run", resume=True)
    assert_same_state(full_run.snapshot, again.snapshot, 0)
    settings: dict[str, Any] = {"loss": squared, "rounds": 4, "local": LOCAL, "seed": 3}
    loaded = fl.load(tmp_path / "run", "fedavg", structures(), Dicts, **settings)
    predictions = [trained.server.predict(bags(3))[0]["sum"] for trained in (loaded, full_run.trained)]
    assert torch.equal(*predictions)
    other = fl.data.federate(bags(48), "iid", clients=4, collate=lambda samples: collate_pairs(samples))
    with pytest.raises(fl.FedLoomError, match="collate"):
        fl.load(tmp_path / "run", "fedavg", other, Dicts, **settings)


def test_metrics_of_ones_own_see_all_samples_of_a_client_and_of_all() -> None:
    calls = []

    @fl.metrics.metric(direction="min")
    def bag_error(out: Any, y: Any) -> float:
        calls.append(len(out))
        return float(np.mean([abs(float(o["sum"]) - float(target[0].sum())) for o, target in zip(out, y, strict=True)]))

    on = {"what": ("clients",), "metrics": ("bag_error",)}
    result = play(evaluation=on, rounds=1)
    sizes = result.trained.federation.held_out.index.sizes
    assert sorted(calls[-1 - len(sizes) :]) == sorted([*sizes, sizes.sum()])
    per_client = result.summary["final"]["clients/bag_error/mean"]
    assert per_client > 0


def test_inputs_of_any_structure_with_plain_targets_have_all_that_goes_by_targets() -> None:
    """Partitions by label, accuracy, metrics of scores, and objectives that read class numbers."""
    federation = labelled_federation()
    assert repr(federation).startswith("<Federation: 4 clients, samples to collate, 2 classes; ")
    assert np.ptp(federation.train.index.sizes) > 0
    result = play("fedlc", federation, evaluation={"metrics": ("accuracy", "cross_entropy"), "what": ("clients",)})
    assert 0 <= result.summary["final"]["clients/accuracy/mean"] <= 1
    assert result.trained.server.predict([torch.ones(3), torch.ones(1)]).shape == (2,)
    test = federation.held_out.client(0)
    assert set(result.trained.client(0).evaluate(test.x.items, test.y)) == {"accuracy", "cross_entropy"}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "labels": (lambda: fl.data.federate(bags(9), "dirichlet", clients=2, collate=collate_pairs), "reads class numbers"),
    "dp": (lambda: play(local=fl.Local(steps=2, dp_clip=1.0)), "local.dp_clip takes samples by themselves or in rows"),
    "pieces": (lambda: play(local=fl.Local(micro_batch=2)), "local.micro_batch takes samples by themselves"),
    "adapted": (lambda: play("per_fedavg", labelled_federation()), "adaptation 'maml' takes samples"),
    "start": (lambda: play("fedala", labelled_federation()), "a start that learns from samples takes"),
    "classes": (lambda: fl.run("fedavg", structures(), Dicts), "give a loss of your own"),
    "images": (lambda: play(augment=["flip"]), "needs images"),
    "by name": (lambda: fl.run("fedavg", structures(), "mlp", loss=squared), "give a module of your own"),
    "loss": (lambda: fl.run("fedavg", structures(), Dicts, loss=nn.MSELoss()), "fails on outputs a dict"),
    "metric": (lambda: play(evaluation={"metrics": ("auroc",)}), "are structures"),
    "export": (lambda: play(rounds=0).trained.server.export("x.onnx", "onnx"), "choose safetensors"),
    "table": (
        lambda: fl.data.federate(bags(9), "iid", clients=2, collate=collate_pairs, standardise=True),
        "is for tables",
    ),
    "column": (
        lambda: fl.data.federate(bags(9), collate=collate_pairs, client="site"),
        "give the client of each sample",
    ),
    "pair": (
        lambda: fl.data.federate(bags(2), "iid", clients=1, y=[0, 1], test=bags(2), collate=collate_inputs),
        "test samples are",
    ),
    "iterator": (
        lambda: fl.data.federate(iter(bags(2)), "iid", clients=1, collate=collate_pairs),
        "are a sequence, not a",
    ),
    "no pair": (
        lambda: fl.run("fedavg", fl.data.federate(bags(9), "iid", clients=2, collate=lambda _: 3), Dicts, loss=squared),
        "collate returned 3; without y= it returns the pair",
    ),
    "failing": (
        lambda: fl.run("fedavg", fl.data.federate(bags(9), "iid", clients=2, collate=str.split), Dicts, loss=squared),
        "collate fails on two samples: TypeError",
    ),
    "tensor": (lambda: Samples([1], torch.tensor).mean(), "asks for their 'mean'"),
    "rows": (lambda: Samples([1], torch.tensor)[:1], "asks for their 'rows'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_combine_with_structures_is_refused_in_a_sentence(case: str) -> None:
    do, words = REFUSED[case]
    with pytest.raises((ConfigError, DataError), match=words):
        do()


def test_own_sources_and_models_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that asks for no shape of inputs is made by its name; predictions of files are refused."""
    monkeypatch.setattr(models, "_entries", dict(models._entries))
    monkeypatch.setattr(models, "_names", dict(models._names))

    @models.register
    def bag_sums(classes: int) -> nn.Module:
        """Sums of bags."""
        return Sums(classes)

    result = fl.run("fedavg", labelled_federation(), "bag_sums", rounds=1)
    assert result.trained.server.module.head.out_features == 2
    with pytest.raises(DataError, match="predict in Python"):
        result.trained.server.read(Path("x.npz"))
