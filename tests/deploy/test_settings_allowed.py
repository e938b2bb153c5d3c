"""What a server may set at a node: every setting by its key, with the range of its own annotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.deploying import config, in_process

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Range, Words, range_of
from fedloom.base.settings import signature
from fedloom.cli import main
from fedloom.core.local import Local
from fedloom.core.slots import SEVERAL
from fedloom.methods import methods
from fedloom_apps.deploy.allowed import WHOLE, _parameters_by_place, check, table
from fedloom_apps.deploy.assignment import settings_of
from fedloom_apps.deploy.data import DataSpec
from fedloom_apps.deploy.messages import Order
from fedloom_apps.deploy.settings import DEPLOY
from fedloom_apps.deploy.wire import unpack


def test_every_setting_of_local_training_has_a_range() -> None:
    free = [name for name, p in signature(Local).items() if range_of(p.annotation) is None and p.annotation is not bool]
    assert free == []


def test_every_text_of_a_part_is_a_word_of_a_list_or_names_slices() -> None:
    """What is not in the table keeps its default: folders, files, networks of the hub and lists of networks."""
    listed = table()
    missing = {
        f"{place}.{key}"
        for place, parameters in _parameters_by_place()
        for key in parameters
        if f"{place}.{key}" not in listed
    }
    assert missing == {
        "model=timm.network", "model=timm.weights", "model=transformers.network", "model=transformers.config",
        "model=transformers.lora_targets", "model=several.names", "method.topology=edge_list.pairs",
    }  # fmt: skip


@pytest.mark.parametrize("method", methods.names())
def test_every_method_as_it_is_may_be_set(method: str) -> None:
    check(DEPLOY.resolve([f"method={method}", "data=digits"]).values)


def beyond(annotation: Any) -> list[Any]:
    """Values that no setting of this kind may have."""
    bounds = range_of(annotation)
    if isinstance(bounds, Words):
        return ["/etc/passwd", "hf-hub:a/b", bounds.words[0] + "x"]
    high = bounds.high if isinstance(bounds, Range) and bounds.high < float("inf") else max(WHOLE, 1e12)
    low = bounds.low if isinstance(bounds, Range) and bounds.low > -float("inf") else -1e12
    return [2 * high + 2, low - 1 if low > -1e12 else 2 * low, "/etc/passwd", ["/etc/passwd"], {"a": 1e300}]


def settings() -> list[tuple[str, str, Any]]:
    """Every key of local training and of the parts, with the place where it stands, and its annotation."""
    places = ((place, key, p) for place, parameters in _parameters_by_place() for key, p in parameters.items())
    return [(place, key, p.annotation) for place, key, p in places if place.startswith(("local", "method"))]


@pytest.mark.parametrize("place", sorted({place for place, *_ in settings()}))
def test_no_setting_goes_beyond_its_range(place: str) -> None:
    tried, plain = 0, settings_of(config().values)
    for _, key, annotation in (row for row in settings() if row[0] == place):
        if annotation is bool:
            continue
        for value in beyond(annotation):
            tried_settings = dict(plain)
            if place == "local":
                tried_settings["local"] = tried_settings["local"] | {key: value}
            else:
                slot, _, name = place.removeprefix("method.").partition("=")
                part = {name: {key: value}} if slot in SEVERAL else {"name": name, key: value}
                tried_settings["method"] = {"name": "fedavg", slot: part}
            with pytest.raises(ConfigError, match=rf"{key} (must|is)"):
                check(tried_settings)
            tried += 1
    assert tried or all(annotation is bool for where, _, annotation in settings() if where == place)


@pytest.mark.parametrize(
    "changed",
    [
        {"local": {"batch_size": WHOLE + 1}},
        {"local": {"lr": 1e13}},
        {"augment": ["crop", {"name": "crop", "padding": 2**40}]},
        {"evaluation": {"batch_size": 2**40}},
        {"evaluation": {"metric": "/etc/passwd"}},
        {"method": {"name": "fedavg", "uplink": {"top_k": {"slices": ["../../x"]}}}},
        {"method": {"name": "fedavg", "mixing": {"name": "fixed", "weights": [1e13]}}},
        {"compute": {"name": "batched", "shares": 2**40}},
        {"model": {"name": "mlp", "hidden": [1] * 10_001}},
        {"model": {"name": "wide_resnet", "depth": 60_004}},
        {"augment": ["flip"] * 10_001},
    ],
)
def test_a_node_answers_with_a_code_before_it_reads_its_data(changed: dict[str, Any], tmp_path: Path) -> None:
    transport = in_process(configuration := config("clients=2"), tmp_path)
    node = transport.nodes["node-0"]
    assert node is not None
    order = Order(32 * "0", ("join",), {"run": "a1", "settings": settings_of(configuration.values) | changed,
                                        "data": vars(DataSpec((1, 8, 8), 10))})  # fmt: skip
    answer = unpack(node.answer(order.packed())).facts
    assert (answer["status"], answer["code"]) == ("refused", "settings")
    assert node._samples is None
    transport.close()


def test_the_owner_reads_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "allowed"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "local.momentum: a number in [0, 1)" in out
    assert "method.drift=dynamic.alpha: a number greater than 0" in out
    assert out[-1] == "Without an upper end: whole numbers up to 1,048,576, others up to 1e+12."
    assert main(["deploy", "allowed", "more"]) == 2
