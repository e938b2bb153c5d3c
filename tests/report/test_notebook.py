"""What a notebook shows of results, federations and methods."""

from __future__ import annotations

from dataclasses import replace

import fedloom as fl
from fedloom_apps.report.notebook import html, names_of, slots_picture


def test_a_run_and_its_federation_show_a_table_and_a_picture() -> None:
    federation = fl.data.federate("digits", fl.data.partitions.make("dirichlet", alpha=0.5), clients=4, seed=0)
    result = fl.run("fedavg", federation, "logistic", rounds=2)
    told = f"{100 * result.summary['final']['global/accuracy']:.1f} %"
    for shown in (result._repr_html_(), result.trained._repr_html_()):
        assert shown is not None
        assert f'accuracy</th><td style="text-align:left">{told}<' in shown
        assert shown.count("<svg") == 1
    page = federation._repr_html_()
    assert page is not None
    assert "dirichlet, alpha 0.5" in page
    assert page.count("<svg") == 1
    assert html("fedavg") is None  # what a notebook shows by itself


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
