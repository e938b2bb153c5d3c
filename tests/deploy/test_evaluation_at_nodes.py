"""What nodes measure on their own test samples, and what the server tells of those that do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.deploying import config, in_process, simulation

from fedloom_apps.deploy.messages import EVALUATE, Order
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.wire import pack, unpack


@pytest.mark.parametrize("method", ["decouple", "fedhen"])
def test_clients_with_parts_of_the_model_measure_what_a_simulation_does(method: str, tmp_path: Path) -> None:
    words = [f"method={method}", "model=exit_cnn", "model.channels=[4,4,8]", "rounds=2", "evaluation.what=[clients]"]
    transport = in_process(settings := config(*words), tmp_path)
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    for record, expected in zip(result.history, simulation(*words).history, strict=True):
        for key in ("clients/accuracy/mean", "clients/loss/mean"):
            assert record[key] == pytest.approx(expected[key], abs=1e-6), key
        assert record["deploy/unmeasured"] == 0
    assert not any("to evaluate" in warning for warning in result.summary["warnings"])


WHY = (
    "node-1: its data do not fit the data specification, or are not those with which it began the run (data); see the "
    "log of the node."
)


def test_nodes_that_refuse_to_evaluate_are_counted_and_the_reason_is_told(tmp_path: Path) -> None:
    """Once while the run goes on, and in its summary; nodes with an answer are measured."""
    transport = in_process(settings := config("rounds=2", "evaluation.what=[clients]"), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if name == "node-1" and EVALUATE in Order.read(transport.sent[name][number].order, 10**6).do:
            facts = {"ticket": unpack(blob).facts["ticket"], "status": "refused", "code": "data"}
            return [pack("answer", facts)]
        return [blob]

    transport.route = route
    with pytest.warns(UserWarning, match="evaluate the model") as warnings:
        result = run(Recipe.of(settings), transport, 4)
    transport.close()
    assert [str(warning.message) for warning in warnings] == [
        f"round 1: 1 of 4 nodes refused or failed to evaluate the model; {WHY}"
    ]
    assert [record["deploy/unmeasured"] for record in result.history] == [1, 1]
    assert all("clients/accuracy/mean" in record for record in result.history)
    sentence = f"nodes refused or failed to evaluate the model 2 times; {WHY}"
    assert sentence in result.summary["warnings"]


def test_absent_nodes_are_not_counted_as_refusing_to_evaluate(tmp_path: Path) -> None:
    transport = in_process(settings := config("rounds=1", "evaluation.what=[clients]"), tmp_path)
    transport.route = lambda name, number, blob: [] if name == "node-1" and number == 2 else [blob]
    recipe = Recipe.of(settings)
    recipe = replace(recipe, deployment=replace(recipe.deployment, deadline=0.1))
    result = run(recipe, transport, 4)
    transport.close()
    assert result.history[0]["deploy/unmeasured"] == 0


def test_a_server_without_test_samples_does_not_say_that_nothing_was_evaluated(tmp_path: Path) -> None:
    words = ["deploy.inputs=[1,8,8]", "deploy.classes=10", "rounds=1", "evaluation.what=[global,clients]"]
    transport = in_process(config("rounds=1"), tmp_path)
    result = run(Recipe.of(config(*words)), transport, 4)
    transport.close()
    assert "clients/accuracy/mean" in result.history[0]
    assert not result.summary["warnings"]


def test_a_deployment_whose_nodes_have_no_test_samples_says_so(tmp_path: Path) -> None:
    transport = in_process(settings := config("rounds=1", "held_out=0", "evaluation.what=[clients]"), tmp_path)
    result = run(Recipe.of(settings), transport, 4)
    transport.close()
    assert "clients/accuracy/mean" not in result.history[0]
    (warning,) = result.summary["warnings"]
    assert warning.startswith("no node has test samples, so that clients are not evaluated; keep some of each node's")
