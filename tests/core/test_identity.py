"""The identity of a user's functions: by their source code and the values that they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import experiment
from torch import Tensor

from fedloom.base.errors import CheckpointError
from fedloom.core.identity import of_function
from fedloom.experiment.federated import load, run
from fedloom.methods import make
from fedloom.parts.objectives.custom import Loss


def described(function: Callable[..., Any]) -> str:
    return of_function(function).partition(" ")[2]


def test_a_function_is_known_by_what_it_computes_not_by_how_it_is_written() -> None:
    def plain(x, y=(1, 2)):
        return [a if a else None for a in x][::y[0]], f"{x!r}"  # fmt: skip

    def commented(x: list[int], y: tuple[int, int] = (1, 2)) -> Any:
        """Has a docstring."""
        # and a comment
        return [a if a else None for a in x][:: y[0]], f"{x!r}"

    def other(x, y=(1, 2)):
        return [a if a else 0 for a in x][:: y[0]], f"{x!r}"

    def with_another_default(x, y=(1, 3)):
        return [a if a else None for a in x][:: y[0]], f"{x!r}"

    assert described(plain) == described(commented)
    assert described(plain) == "code 48c50bfdbd8e 05c87722130b", "in every version of Python"
    assert described(plain).split()[1] != described(other).split()[1]
    assert described(plain).split()[1] == described(with_another_default).split()[1]
    assert described(plain).split()[2] != described(with_another_default).split()[2]


def test_lambdas_of_one_line_are_told_apart() -> None:
    pair = (lambda x: x + 1, lambda x: x * 2)  # fmt: skip
    nested = lambda x: lambda y: x + y  # noqa: E731
    (wide,) = (
        lambda x:
        x + 1,
    )  # fmt: skip
    names = [described(function) for function in (*pair, nested, nested(0))]
    assert len(set(names)) == 4
    assert described(wide) == names[0]
    assert described(nested(0)) != described(nested(1)), "the values that it holds"


def test_a_function_without_source_is_known_by_its_instructions() -> None:
    functions: dict[str, Any] = {"__name__": "own"}
    exec("def one(x): return x + 1\ndef same(x): return x + 1\ndef other(x): return x - 1", functions)
    assert described(functions["one"]) == described(functions["same"]) != described(functions["other"])


def test_other_code_is_a_warning_for_a_load_and_a_refusal_for_a_resume(tmp_path: Path) -> None:
    def with_loss(function: Callable[..., Tensor], rounds: int = 1):
        return experiment(replace(make("fedavg"), objective=(Loss(function, "own"),)), rounds=rounds)

    def scaled(by: float) -> Callable[..., Tensor]:
        return lambda out, y: by * out.square().mean(1)

    def doubled(by: float) -> Callable[..., Tensor]:
        return lambda out, y: by * 2 * out.square().mean(1)

    first = scaled(1.0)
    second = doubled(1.0)
    first.__qualname__ = second.__qualname__ = "loss"
    trained = run(with_loss(first), tmp_path / "a").trained
    with pytest.warns(UserWarning, match=r"a was trained with other code: method\.\S*: Loss\(own: loss code \w+ "):
        again = load(with_loss(second), tmp_path / "a")
    assert again.snapshot.server.theta.equal(trained.snapshot.server.theta)
    with pytest.raises(CheckpointError, match=r"cannot be continued: .* code"):
        run(with_loss(second, 2), tmp_path / "a", resume=True)
    other = scaled(2.0)
    other.__qualname__ = "loss"
    with pytest.raises(CheckpointError, match="is not a run of this experiment"):
        load(with_loss(other), tmp_path / "a")
