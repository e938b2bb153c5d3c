"""A law over refusals of combinations: each has a smallest case that breaks it, and its sentence can be formed."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.base.errors import ConfigError
from fedloom.core import compatibility
from fedloom.experiment import evaluation, setup
from fedloom.experiment.experiment import Experiment
from fedloom.rounds import example_privacy
from fedloom.rounds.plan import ClientPlan
from fedloom_apps.deploy.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from combinations import CASES  # pyright: ignore[reportMissingImports]
from site_pages import combinations_page  # pyright: ignore[reportMissingImports]

CHECKS = (
    compatibility.check, compatibility._check_client_work, compatibility._check_target, compatibility._check_uplink,
    compatibility._check_topology, Experiment._check_needs, Experiment._check_attack, ClientPlan.__post_init__,
    example_privacy.check,
    evaluation.check_evaluation, evaluation.check_means, setup.require_features, setup._private, setup._momentum,
    Recipe.refuse,
)  # fmt: skip
ALL = {f"{topic}: {title}": case for topic, cases in CASES.items() for title, case in cases.items()}


def refusal(case: Callable[[], Any]) -> tuple[str, str, int]:
    """The sentence of a case, and the file and line that raised it."""
    with pytest.raises(ConfigError) as error:
        case()
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    return str(error.value), last.filename, last.lineno or 0


def raises(check: Callable[..., Any]) -> list[tuple[str, range]]:
    """File and lines of every ``raise`` in a function."""
    check = inspect.unwrap(check)  # of what checks shapes
    lines, first = inspect.getsourcelines(check)
    nodes = ast.walk(ast.parse(textwrap.dedent("".join(lines))))
    spans = [(node.lineno, node.end_lineno or node.lineno) for node in nodes if isinstance(node, ast.Raise)]
    return [(inspect.getfile(check), range(first + start - 1, first + end)) for start, end in spans]


@pytest.mark.parametrize("name", ALL)
def test_what_does_not_combine_is_refused_in_one_sentence(name: str) -> None:
    sentence, file, line = refusal(ALL[name])
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert any(file == path and line in span for check in CHECKS for path, span in raises(check)), f"{file}:{line}"


def test_every_refusal_has_a_case() -> None:
    places = [refusal(case)[1:] for case in ALL.values()]
    for check in CHECKS:
        for file, span in raises(check):
            assert any(where == file and line in span for where, line in places), (
                f"{file}:{span.start} is reached by no case of docs/combinations.py; add its smallest one."
            )


def test_every_need_of_conditions_has_a_case() -> None:
    names = inspect.getsource(Experiment._check_needs).split("requirements = {")[1].split("}  # fmt")[0]
    needs = [str(key.value) for key in ast.parse("{" + names + "}").body[0].value.keys]  # type: ignore[attr-defined]
    text = " ".join(refusal(case)[0] for case in CASES["Data and conditions"].values())
    words = {
        "full_participation": "every client in every round",
        "probabilities": "the probabilities with which clients take part", "twin": "two augmented views",
        "target": "the data have none", "public": "sends unlabelled inputs to clients", "views": "two views of inputs",
        "teacher": "a trained model to learn from", "sgd": "local training by sgd",
        "common_classes": "class numbers", "validation": "responses on validation samples",
    }  # fmt: skip
    assert set(needs) == set(words)
    assert all(word in text for word in words.values())


def test_the_page_has_every_case() -> None:
    page = combinations_page()
    assert page.startswith("# What does not combine, and why\n")
    for topic, cases in CASES.items():
        assert f"## {topic}\n" in page
        assert all(title in page and refusal(case)[0].replace("|", "\\|") in page for title, case in cases.items())
