"""What a notebook shows of results, federations and methods."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import fedloom as fl
from fedloom.core.links import Links
from fedloom.experiment.trained import RunRecords
from fedloom.parts.topology import EdgeList, Exponential
from fedloom_apps.report.notebook import html, names_of, slots_picture
from fedloom_apps.report.page import build


def test_a_run_and_its_federation_show_a_table_and_a_picture() -> None:
    federation = fl.data.federate("digits", fl.data.partitions.make("dirichlet", alpha=0.5), clients=4, seed=0)
    result = fl.run("fedavg", federation, "logistic", rounds=2)
    accuracy = f"{100 * result.summary['final']['global/accuracy']:.1f} %"
    for page in (result._repr_html_(), result.trained._repr_html_()):
        assert page is not None
        assert f'accuracy</th><td style="text-align:left">{accuracy}<' in page
        assert page.count("<svg") == 1
    page = federation._repr_html_()
    assert page is not None
    assert "dirichlet, alpha 0.5" in page
    assert page.count("<svg") == 1
    assert html("fedavg") is None  # what a notebook shows by itself


def test_a_graph_of_ones_own_is_drawn_in_the_notebook_and_on_the_page_of_its_run(tmp_path: Path) -> None:
    topology = EdgeList(pairs=((0, 1), (1, 2), (2, 3)))
    links_page = topology.links(4, 0)._repr_html_()
    assert links_page is not None
    assert links_page.count("<svg") == 1
    assert 'messages a round</th><td style="text-align:left">6<' in links_page
    federation = fl.data.federate("digits", "iid", clients=4, seed=0)
    for number, graph in enumerate((topology, Exponential(one_peer=True))):
        fl.run(
            replace(fl.methods.fedavg(), topology=graph), federation, "logistic", rounds=2, out=tmp_path / str(number)
        )
    page = build([tmp_path / "0", tmp_path / "1"], tmp_path / "page", files=["svg"]).read_text()
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page)[1])  # type: ignore[index]
    line, peers = (figure for figure in figures if "nodes" in figure)
    assert sorted(map(tuple, line["edges"])) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert (line["directed"], peers["directed"]) == (False, True)
    assert len(peers["edges"]) == 8, "two rounds together, of four edges each"
    assert "2 rounds together. Spectral gap 0.293." in peers["caption"]
    assert any(figure["name"] == "consensus_distance" and figure["series"] for figure in figures)
    assert (tmp_path / "page" / "figures" / "network_1.svg").is_file()


def test_many_models_are_told_and_not_drawn() -> None:
    page = Links(*(topology := EdgeList(pairs=((0, 1),)).links(300, 0)))._repr_html_()
    assert topology.models == 300
    assert page is not None
    assert "<svg" not in page


def test_a_method_shows_its_parts_by_slot_and_hostile_names_are_text() -> None:
    method = replace(fl.methods.feddyn(alpha=0.1), name="<script>")
    page = method._repr_html_()
    assert page is not None
    assert "dynamic(alpha=0.1, size_weighted=true): " in page
    assert "Method &lt;script&gt;" in page
    assert names_of(method) == {
        slot: {"objective": "cross_entropy", "drift": "dynamic", "mixing": "uniform"}.get(slot, "")
        for slot in names_of(method)
    }
    assert slots_picture(names_of(method)).count("filled") == 3
    text = "Method(name='<script>', objective=(CrossEntropy(),), drift=FedDynDrift(alpha=0.1), mixing=Uniform())"
    assert repr(method).replace(", size_weighted=True", "") == text


def test_a_damaged_summary_is_no_traceback(tmp_path: Path) -> None:
    federation = fl.data.federate("digits", "iid", clients=2, seed=0)
    fl.run("fedavg", federation, "logistic", rounds=1, out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    changes = ({"final": 3}, {"target": "x"}, {"headline": [1]}, {"seconds": "x"}, {"left_out": 3}, {"warnings": 3},
               {"final": {"comm/params": "x"}})  # fmt: skip
    for change in changes:
        assert html(RunRecords([], summary | change)) is None
    for text in (json.dumps({"target": {"metric": "global/accuracy", "value": 10**400}}), "[" * 100_000):
        (tmp_path / "run" / "summary.json").write_text(text)
        (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"round": 1, "global/accuracy": 10**400}))
        assert "summary.json could not be read" in build([tmp_path / "run"], tmp_path / "page").read_text()
