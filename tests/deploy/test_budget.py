"""A node with a privacy budget counts its answers over runs and restarts, and refuses any that would exceed it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from helpers.deploying import InProcess, config, in_process

from fedloom.base.errors import CheckpointError, ConfigError
from fedloom_apps.deploy.budget import FILE, Budget, Ledger
from fedloom_apps.deploy.command import budget
from fedloom_apps.deploy.node import Node
from fedloom_apps.deploy.server import Recipe, run

dp = pytest.importorskip("dp_accounting", reason="the extra 'privacy' is not installed")
pytestmark = pytest.mark.extra("dp_accounting")

PRIVATE = ("local.dp_clip=1.0", "local.dp_noise=2.0", "local.epochs=1", "local.batch_size=16", "local.steps=null")

LOCAL = (
    "method.uplink=[clip_noise]", "method.uplink.clip_noise.noise_at=client", "method.uplink.clip_noise.noise=5.0",
    "method.mixing=uniform",
)  # fmt: skip


def thrifty(tmp_path: Path, epsilon: float, *words: str) -> tuple[InProcess, list[str], Recipe]:
    """A deployment in which node 0 has a budget; also what that node told."""
    transport = in_process(settings := config(*words), tmp_path)
    name, node = next(iter(transport.nodes.items()))
    assert node is not None
    node.close()
    log: list[str] = []
    transport.nodes[name] = Node(node.data, node.home, log.append, budget=Budget(epsilon))
    return transport, log, Recipe.of(settings)


def refusal(recipe: Recipe, transport: InProcess, log: list[str]) -> str:
    """The sentence in the node's log when it refuses to join; the server has its code."""

    def tell(sentence: str) -> None:
        if "privacy budget" in sentence:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, transport, 4, tell=tell)
    return log[-1]


def epsilon(times: int, noise: float) -> float:
    """The exact Gaussian mechanism, a sample replaced: every answer moves by up to twice the bound."""
    return dp.get_epsilon_gaussian(noise / (2 * times**0.5), 1e-5)


def test_a_node_stops_answering_where_its_budget_ends(tmp_path: Path) -> None:
    transport, log, recipe = thrifty(tmp_path, epsilon(3, 2.0) + 0.01, *PRIVATE, "rounds=5")
    result = run(recipe, transport, 4)
    transport.close()
    assert [record["deploy/answered"] for record in result.history] == [4] * 5  # a refusal is an answer
    assert [record["failures"] for record in result.history] == [0, 0, 0, 1, 1]
    epsilons = [float(line.split()[5]) for line in log if "is spent" in line]
    assert epsilons == pytest.approx([epsilon(n, 2.0) for n in (1, 2, 3)], rel=1e-2)
    assert sum("this node's budget is ε" in line for line in log) == 2


def test_the_count_outlives_runs_and_restarts(tmp_path: Path) -> None:
    transport, _, recipe = thrifty(tmp_path, epsilon(3, 2.0) + 0.01, *PRIVATE, "rounds=2")
    run(recipe, transport, 4)
    name, node = next(iter(transport.nodes.items()))
    assert node is not None
    node.close()
    log: list[str] = []
    transport.nodes[name] = Node(node.data, node.home, log.append, budget=node.ledger and node.ledger.budget)
    transport.sessions[name] = 1
    result = run(recipe, transport, 4)
    transport.close()
    assert [record["failures"] for record in result.history] == [0, 1]
    assert json.loads((node.home / FILE).read_text())[0]["orders"] == 3


def test_a_count_that_went_back_is_noticed(tmp_path: Path) -> None:
    """Its file alone, or the folder with it, is older than the second count; a kill between the two is not."""
    transport, _, recipe = thrifty(tmp_path, 50.0, *PRIVATE, "rounds=1")
    run(recipe, transport, 4)
    node = transport.nodes["node-0"]
    assert node is not None
    transport.close()
    older = (node.home / FILE).read_bytes()
    again = Ledger(Budget(50.0), node.home)
    between = again.second.read_bytes()
    again._count(again.orders + again.orders)
    newer = (node.home / FILE).read_bytes()
    for content in (older, None):
        (node.home / FILE).unlink()
        if content is not None:
            (node.home / FILE).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"has [01] orders, but this node has answered 2; restore"):
            Node(node.data, node.home, budget=Budget(50.0))
        (node.home / FILE).write_bytes(newer)
    again.second.write_bytes(between)  # killed before it was written
    assert Ledger(Budget(50.0), node.home).orders.total() == 2
    again.second.write_text("two")
    with pytest.raises(CheckpointError, match="is damaged; it must hold"):
        Ledger(Budget(50.0), node.home)


def test_local_noise_on_the_upload_counts_once_an_order(tmp_path: Path) -> None:
    words = (
        "method.uplink=[clip_noise]",
        "method.uplink.clip_noise.noise_at=client",
        "method.mixing=uniform",
        "rounds=2",
    )
    transport, log, recipe = thrifty(tmp_path, epsilon(2, 1.0) + 0.01, *words)
    run(recipe, transport, 4)
    transport.close()
    epsilons = [float(line.split()[5]) for line in log if "is spent" in line]
    assert epsilons == pytest.approx([epsilon(n, 1.0) for n in (1, 2)], rel=1e-2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "trains only with its own noise"),
        (("method.uplink=[clip_noise]", "method.mixing=uniform"), "trains only with its own noise"),
        (("local.dp_clip=1.0",), "trains only with its own noise"),
        (("local.dp_clip=1.0", "local.dp_noise=0.2"), "this node's budget is ε = 3"),
        (("local.dp_clip=3e-44", "local.dp_noise=5.0"), "its noise, a multiple of that, may be rounded to 0"),
        ((*LOCAL, "method.uplink.clip_noise.clip=1e-45"), "its noise, a multiple of that, may be rounded to 0"),
        ((*LOCAL, "method.uplink.clip_noise.bounds={update: 1e-45}"), "may be rounded to 0"),
    ],
)
def test_a_run_that_protects_too_little_is_not_joined(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    transport, log, recipe = thrifty(tmp_path, 3.0, *words)
    assert sentence in refusal(recipe, transport, log)
    transport.close()
    assert not [*tmp_path.rglob(FILE)]


def test_a_node_with_a_budget_measures_nothing(tmp_path: Path) -> None:
    transport, log, recipe = thrifty(tmp_path, 50.0, *PRIVATE, "rounds=1", "evaluation.what=[clients]")
    with pytest.warns(UserWarning, match="1 of 4 nodes refused .*; node-.: the order asks for quantities"):
        result = run(recipe, transport, 4)
    transport.close()
    assert any("measures no losses and no metrics" in line for line in log)
    assert result.history[-1]["clients/accuracy/clients"] == 3


def test_mini_batches_of_two_kinds_do_not_share_a_budget(tmp_path: Path) -> None:
    transport, log, recipe = thrifty(tmp_path, 50.0, *PRIVATE, "rounds=1")
    run(recipe, transport, 4)
    words = ("local.dp_clip=1.0", "local.dp_noise=2.0", "local.poisson=true", "local.batch_size=16", "rounds=1")
    assert "mini-batches of another kind" in refusal(Recipe.of(config(*words)), transport, log)
    transport.close()


def test_a_damaged_count_is_not_forgotten(tmp_path: Path) -> None:
    for content in ("[{", '[{"work": {"kind": "poisson"}, "orders": 1}]', "[1]"):
        (tmp_path / FILE).write_text(content)
        with pytest.raises(CheckpointError, match="it alone records the spent privacy"):
            Ledger(Budget(1.0), tmp_path)
    with pytest.raises(CheckpointError, match="alone records"):
        Node("digits.npz", tmp_path, budget=Budget(1.0))
    Node("digits.npz", tmp_path).close()  # the folder is free again


@pytest.mark.parametrize(
    ("epsilon", "delta", "sentence"),
    [
        (None, "1e-5", "--delta belongs to --epsilon"),
        ("eight", None, "must be numbers, like --epsilon 8"),
        ("0", None, "epsilon must be a finite number greater than 0"),
        ("nan", None, "epsilon must be a finite number greater than 0"),
        ("8", "2", r"delta must lie in \(0, 1\), not 2"),
    ],
)
def test_what_is_typed_is_checked(epsilon: str | None, delta: str | None, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        budget(Namespace(epsilon=epsilon, delta=delta))
    assert budget(Namespace(epsilon="8", delta="1e-6")) == Budget(8.0, 1e-6)
    assert budget(Namespace(epsilon=None, delta=None)) is None
