"""The page as a whole: self-contained, safe, and complete whatever a run directory lacks."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.pages import figures_of

import fedloom as fl
from fedloom.base.errors import ConfigError, FedLoomError
from fedloom_apps.report import build, paper
from fedloom_apps.report.charts import Axis, Chart, HeatMap, LineStyle, Series
from fedloom_apps.report.groups import read

HOSTILE = "<script>alert('1')</script>"
ODD = 'a_$x^{2}$ & 50% "q" \\ 漢字 #'

VOID = {"meta", "img", "line", "br"}


class Reader(HTMLParser):
    """Notes tags, attributes and text, and whether tags close in order."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.figures: list[dict] = []
        self.scripts: list[str] = []
        self.captions = 0
        self.policy = ""
        self.feed(page.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        attributes = dict(attrs)
        self.links += [attributes[name] for name in ("src", "href", "srcset") if name in attributes]
        if tag == "img" or attributes.get("role") == "img":
            self.figures.append(attributes)
        self.captions += tag == "figcaption"
        self.policy = attributes["content"] if "http-equiv" in attributes else self.policy
        self.ids += [attributes["id"]] if "id" in attributes else []
        assert not any(name.startswith("on") for name in attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture
def three_methods(make_run) -> list[Path]:
    runs = [make_run(method="fedavg", seed=seed) for seed in (1, 2)]
    runs.append(make_run(method=HOSTILE, rate=0.3))
    runs.append(make_run(method=ODD, rounds=7, planned=12, models_up=2, files=("clients.parquet",)))
    return runs


def test_page_figures_and_tables_from_several_methods(three_methods: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    page = build(three_methods, out, title="Do <b>we</b> agree?")
    reader = Reader(page)

    assert page == out / "report.html"
    assert "b" in reader.tags  # only our own: the title's is text
    assert "Do <b>we</b> agree?" in reader.text
    assert HOSTILE in reader.text
    assert {link[1:] for link in reader.links if link.startswith("#")} <= set(reader.ids)
    for word in (
        "Results",
        "Curves",
        "Communication",
        "Clients",
        "Settings",
        "Runs and failures",
        "Citations",
    ):
        assert word in reader.text
    assert "lowest to the highest seed" in reader.text
    assert "7 of 12" in reader.text
    assert "unfinished" in reader.text
    assert "There is no summary.json: the run is not finished." in reader.text
    assert reader.text.count("@article{fedavg2021") == 1

    assert {figure["name"] for figure in figures_of(page)} >= {
        "global_accuracy",
        "clients_loss",
        "train_loss",
        "clients_distribution",
        "gain_over_fedavg",
    }
    assert not (out / "figures").exists()

    latex = (out / "tables.tex").read_text()
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}")
    assert latex.count(r"\label{tab:") == len(list((out / "tables").iterdir())) == page.read_text().count('.tex"')
    assert r"\textless{}script\textgreater{}alert" in latex
    assert r"a\_\$x\textasciicircum{}\{2\}\$ \& 50\%" in latex
    assert latex.replace("漢字", "").isascii()  # of a name; every other letter is one of LaTeX


def test_the_page_makes_no_request_and_runs_its_own_script_only(three_methods: list[Path], tmp_path: Path) -> None:
    page = build(three_methods, tmp_path / "out", title=HOSTILE)
    reader = Reader(page)
    assert reader.tags.count("script") == len(reader.scripts) == 2  # data and code
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in reader.policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert {*rules} == {"default-src", "img-src", "style-src", "script-src"}
    assert rules["img-src"] == "data:"
    assert all(link.startswith(("#", "data:")) for link in reader.links)
    assert not re.search(r"https?://|@import|fetch\(|XMLHttp|innerHTML", page.read_text())
    labels = {line["label"] for figure in figures_of(page) for line in figure.get("series", ())}
    assert {"fedavg", HOSTILE, ODD} <= labels


def test_every_figure_has_a_caption_and_alternative_text(three_methods: list[Path], tmp_path: Path) -> None:
    page = build(three_methods, tmp_path / "out")
    reader = Reader(page)
    assert len(reader.figures) == reader.captions == len(figures_of(page)) > 5
    for figure, attributes in zip(figures_of(page), reader.figures, strict=True):
        assert attributes["aria-label"] == f"{figure['heading']}. {figure['caption']}"
        assert len(figure["caption"]) > 10


def test_tables_can_be_taken_from_the_page(three_methods: list[Path], tmp_path: Path) -> None:
    page = build(three_methods, tmp_path / "out")
    tables = [base64.b64decode(link.partition(",")[2]).decode() for link in Reader(page).links if "text/csv" in link]
    assert sorted(tables) == sorted(path.read_text() for path in (tmp_path / "out" / "tables").iterdir())


def test_figures_for_papers_are_pdf_and_svg(make_run, tmp_path: Path) -> None:
    out, run = tmp_path / "out", make_run(method="_$odd\n", scopes=(), rounds=2, files=())
    build([run], out, files=("pdf",))
    names = {path.name for path in (out / "figures").iterdir()}
    assert names == {f"train_loss{over}.pdf" for over in ("", "_bytes", "_wall-clock")}
    assert all((out / "figures" / name).read_bytes().startswith(b"%PDF") for name in names)
    cloud = Series("a group", LineStyle("#0072B2"), [np.arange(3.0)], np.arange(3.0))
    points = Chart("gain", "Gain", "", [Axis("x")], Axis("y", "percent"), [cloud], points=True, diagonal=True)
    heat = HeatMap("mixing", "Mixing", "", "round", "client", ["1", "2"], ["0"], np.array([[0.5, np.nan]]), middle=1)
    drawings = dict(paper.files([points, heat], ["svg"]))
    assert list(drawings) == ["gain.svg", "mixing.svg"]
    assert b">a group<" in drawings["gain.svg"]  # text, not outlines
    assert all(b"<svg" in content for content in drawings.values())
    long = replace(points, heading="Deployed models on the clients' own test data, mean over clients: accuracy")
    (svg,) = (content.decode() for _, content in paper.files([long], ["svg"]))
    (width,) = re.findall(r'<svg .*?width="([\d.]+)pt"', svg, re.DOTALL)
    assert float(width) < 1.1 * 3.4 * 72, "one column wide, however long its title"
    assert "over clients: accuracy" in svg


def test_figures_are_chosen_by_name_and_look_as_styles_say(tmp_path: Path) -> None:
    """A style may neither run LaTeX, which would run what it reads, nor write pictures beside the file."""
    heat = HeatMap("mixing", "Mixing_1", "", "round", "client", ["1"], ["0"], np.ones((1, 1)))
    gains = [replace(heat, name=name) for name in ("gain_1", "gain_2")]
    file = tmp_path / "mine.mplstyle"
    file.write_text("figure.figsize: 5, 3\nsavefig.bbox: standard\nfont.family: monospace\nfont.size: 20\n"
                    "text.usetex: True\nsvg.image_inline: False\n")  # fmt: skip
    drawings = dict(paper.files([heat, *gains], ["svg"], only=["gain*"], sheets=["grayscale", str(file)]))
    assert list(drawings) == ["gain_1.svg", "gain_2.svg"]
    svg = drawings["gain_1.svg"]
    assert b'width="360pt" height="216pt"' in svg
    assert re.search(rb"20px[^>]*mono", svg, re.IGNORECASE)
    assert b"data:image/png" in svg
    for wrong, message in ((("gain",), "unknown figure 'gain'"), (("*",), "unknown style or file 'gray'")):
        with pytest.raises(ConfigError, match=re.escape(message)):
            next(paper.files([heat, *gains], ["svg"], only=wrong, sheets=["gray"]))
    for wrong, message in (
        ("font.size: huge", "is not a style of matplotlib"),
        ("figure.figsize: -5, 3", "mixing cannot be drawn in these styles: figure size must be positive"),
        ("savefig.dpi: 20000", "mixing cannot be drawn in these styles: it has more than 100,000,000 pixels"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=message):
            next(paper.files([heat], ["svg"], sheets=[str(file)]))


def test_a_style_runs_no_code(tmp_path: Path) -> None:
    """Before version 3.11 matplotlib evaluates a style's cycle of colours, which no figure needs, as Python."""
    file, there = tmp_path / "strange.mplstyle", tmp_path / "there"
    python = f"[b['__import__']('os').mkdir({str(there)!r}) for b in g[0]]"
    frames = f"g.append((g[0].gi_frame{5 * '.f_back'}.f_builtins for _ in [1]))"
    cycle = f"[[{frames} or {python}] for g in [[]]] and cycler('color', 'rgb')"
    file.write_text(f" axes.prop_cycle\t: {cycle}\nfont.size: 20\n")
    (style,) = paper.styles([str(file)])
    assert dict(style) == {"font.size": 20}
    assert not there.exists()


def test_a_live_page_reads_itself_again(make_run, tmp_path: Path) -> None:
    run = make_run(rounds=2)
    assert 'data-reload="0"' in build([run], tmp_path / "out").read_text()
    assert 'data-reload="3"' in build([run], tmp_path / "out", reload=3).read_text()


def test_a_page_that_is_written_again_leaves_no_table_of_other_runs(make_run, tmp_path: Path) -> None:
    first, second, out = make_run(), make_run(method="other"), tmp_path / "out"
    build([first, second], out)
    (out / "tables" / "mine.csv").write_text("a,b\n")
    assert (out / "tables" / "settings.csv").is_file()
    build([first], out)
    names = {path.stem for path in (out / "tables").glob("*.csv")}
    assert names == {"mine", *re.findall(r'id="table-(\w+)"', (out / "report.html").read_text())}
    assert "settings" not in names


def test_one_unfinished_run_with_nothing_but_the_two_files(make_run, tmp_path: Path) -> None:
    run = make_run(scopes=("global",), rounds=3, files=())
    text = Reader(build([run, run], tmp_path / "out")).text
    assert "1 method, 1 run." in text
    assert "One run each." in text
    assert "Mixing" not in text
    assert "Citations" not in text


def test_a_run_before_its_first_round_and_one_without_evaluation(make_run, tmp_path: Path) -> None:
    empty, blind = make_run(rounds=2, files=()), make_run(method="blind", rounds=3, scopes=(), files=())
    (empty / "metrics.jsonl").write_text("")
    alone = Reader(build([empty], tmp_path / "alone")).text
    assert "No run has recorded an evaluation yet." in alone
    both = Reader(build([empty, blind], tmp_path / "both")).text
    assert "Clients during their local training" in both


def test_nan_null_infinity_broken_lines_and_broken_files_are_survived_and_said(make_run, tmp_path: Path) -> None:
    run = make_run(rounds=6)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1]["global/accuracy"], rows[3]["global/loss"] = None, float("inf")
    rows[5] |= {"global/accuracy": float("nan"), "global/loss": None, "failures": 3, "clients/accuracy/mean": "x"}
    lines = [json.dumps(row) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '"text"', '{"no": "round"}', lines[0][:20]]))
    (run / "clients.parquet").write_bytes(b"PAR1 cut off")
    (run / "mixing.parquet").unlink()
    failed = {"failures": ["round 6, client 3: update: loss is NaN", 
                           {"round": 6, "client": 4, "kind": "code", "reason": "<b>"}]}  # fmt: skip
    (run / "summary.json").write_text(json.dumps(failed | {"warnings": ["disk nearly full"]}))
    text = Reader(build([run], tmp_path / "out")).text
    assert "3 lines of metrics.jsonl could not be read" in text
    assert "clients.parquet could not be read" in text
    assert "3 client updates were lost and left out." in text
    assert "round 6, client 3: update: loss is NaN" in text
    assert "round 6, client 4: code, <b>" in text
    assert "disk nearly full" in text
    assert "NaN" in text


def test_values_of_any_type_are_text_on_the_page(make_run, tmp_path: Path) -> None:
    odd = {"method": {"name": 3}, "seed": None, "rounds": "many", "clients": [1, {"<i>": 2}], "participation": "half"}
    odd |= {"evaluation": {"target": "high", "metric": ["x"]}, "cohort": True, "data": None, "model": {}, "0": 1.5}
    facts = {"method": {"name": ["a"], "mixing": {"cdf": 1}}, "model": {"parameters": "9"}, "federation": None}
    run = make_run(rounds=3, config={**odd, "identity": facts})
    summary = {
        "method": 7,
        "status": {"a": 1},
        "failures": [{"<s>": 2}],
        "warnings": "x",
        "target": [1],
        "seconds": "9",
    }
    (run / "summary.json").write_text(json.dumps(summary | {"headline": None, "parameters": None}))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[0] |= {
        "failures": "two",
        "cohort": None,
        "global/accuracy": [1],
        "comm/params": {"a": 1},
        "<b>/accuracy": True,
    }
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reader = Reader(build([run], tmp_path / "out"))
    assert "[1,{<i>: 2}]" in reader.text
    assert "{'<s>': 2}" in reader.text
    assert not {"i", "s"} & set(reader.tags)


def test_a_run_from_python_is_told_by_its_identity(make_run, tmp_path: Path) -> None:
    facts = {"method": {"name": "mine"}, "federation": {"clients": 3, "digest": "d"}, "model": {"parameters": 5}}
    runs = [make_run(seed=seed, rounds=2, scopes=("global",), files=()) for seed in (1, 2)]
    for seed, run in enumerate(runs):
        (run / "config.yaml").write_text(json.dumps({"identity": facts | {"seed": seed}}))
    text = Reader(build(runs, tmp_path / "out")).text
    assert "mine: 1 method, 2 runs." in text
    assert "bands reach" in text


def test_runs_from_python_with_several_seeds_are_one_group_a_method(tmp_path: Path) -> None:
    for method in ("fedavg", "feddyn"):
        for seed in (1, 2, 3):
            federation = fl.data.federate("digits", "dirichlet", clients=3, seed=seed)
            fl.run(method, federation, "logistic", rounds=1, seed=seed, out=tmp_path / f"{method}-{seed}")
    federation = fl.data.federate("digits", "dirichlet", clients=3, seed=1)
    groups = read([tmp_path])  # a folder of runs
    assert [(member.label, len(member.runs)) for member in groups] == [("fedavg", 3), ("feddyn", 3)]
    fl.run("feddyn", federation, "mlp", rounds=1, seed=4, out=tmp_path / "larger")
    labels = [(member.label, len(member.runs)) for member in read([tmp_path])]
    assert labels[0] == ("fedavg", 3)
    assert [count for _, count in labels[1:]] == [3, 1]
    assert all("model.parameters=" in label for label, _ in labels[1:])


def test_a_folder_of_runs_stands_for_all_of_them(make_run, tmp_path: Path) -> None:
    runs = [make_run(seed=seed, rounds=2, files=()) for seed in (1, 2)]
    page = build([str(tmp_path / "runs")], str(tmp_path / "out"))
    assert page.read_bytes() == build(runs, tmp_path / "again").read_bytes()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedLoomError, match="is not a run directory and contains none"):
        build([tmp_path / "empty"], tmp_path / "out")


def test_a_run_inside_a_folder_that_has_no_round_yet_is_named(make_run, tmp_path: Path) -> None:
    complete, early = (make_run(seed=seed, rounds=2, files=()) for seed in (1, 2))
    (early / "metrics.jsonl").unlink()
    (early / "checkpoint").mkdir()
    with pytest.warns(UserWarning, match=r"runs/run1: left out, since no round has ended\.$"):
        page = build([tmp_path / "runs"], tmp_path / "out")
    assert page.read_bytes() == build([complete], tmp_path / "again").read_bytes()


def test_a_run_inside_a_folder_that_lost_its_configuration_is_named(make_run, tmp_path: Path) -> None:
    complete, lost = (make_run(seed=seed, rounds=2, files=()) for seed in (1, 2))
    (lost / "config.yaml").unlink()
    with pytest.warns(UserWarning, match=r"runs/run1 lacks config\.yaml and is left out\.$"):
        page = build([tmp_path / "runs"], tmp_path / "out")
    assert page.read_bytes() == build([complete], tmp_path / "again").read_bytes()
    (complete / "config.yaml").unlink()
    with pytest.raises(FedLoomError, match=r"contains none; .*run0, .*run1 lack config\.yaml\.$"):
        build([tmp_path / "runs"], tmp_path / "out")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.yaml", "is not a run directory: it has no config.yaml"),
        ("metrics.jsonl", "has no rounds on record: its metrics.jsonl is missing; leave it out"),
    ],
)
def test_not_a_run_directory_names_the_missing_file(make_run, tmp_path: Path, missing: str, message: str) -> None:
    run = make_run(rounds=2)
    (run / missing).unlink()
    with pytest.raises(FedLoomError, match=rf"run0 {message}\.$"):
        build([run], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_use_ends_in_a_sentence(make_run, tmp_path: Path) -> None:
    with pytest.raises(FedLoomError, match="needs at least one run directory"):
        build([], tmp_path / "out")
    with pytest.raises(FedLoomError, match="no such directory"):
        build([tmp_path / "nowhere"], tmp_path / "out")
    run = make_run(rounds=2, scopes=())
    (tmp_path / "file").write_text("")
    with pytest.raises(FedLoomError, match=r"the report cannot be written to .*, which is a file; give a folder"):
        build([run], tmp_path / "file")
    (run / "config.yaml").write_text("a: [1")
    with pytest.raises(FedLoomError, match=r"config\.yaml cannot be read as a configuration"):
        build([run], tmp_path / "out")
    for spoilt in ("- 1", "", "{}"):
        (run / "config.yaml").write_text(spoilt)
        with pytest.raises(FedLoomError, match="holds no settings: it was emptied or damaged"):
            build([run], tmp_path / "out")
    (run / "config.yaml").write_text("identity: 3")
    with pytest.raises(FedLoomError, match="its identity holds no settings"):
        build([run], tmp_path / "out")


def test_tables_and_facts_of_strangers_end_no_page(make_run, tmp_path: Path) -> None:
    good = {"round": [1, 1], "model": [0, 1], "source": [1, 0], "weight": [0.5, 0.5]}
    changes = (
        {},
        {"source": [10**6, 0]},
        {"model": [-9, 1]},
        {"model": ["<script>", "1"]},
        {"weight": ["</script>", "1"]},
        {"round": [[1], [2]]},
    )
    runs = [make_run(rounds=2, method=f"m{number}") for number in range(len(changes))]
    for run, change in zip(runs, changes, strict=True):
        pd.DataFrame(good | change).to_parquet(run / "topology.parquet")
    for run, about in zip(runs, (5, {"spectral_gap": "<script>"}), strict=False):
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"topology": about}))
    page = build(runs, tmp_path / "out").read_text()
    assert "network_1" in page
    assert "network_2" not in page
    assert "topology.parquet has no usable numbers in the column model" in page


@pytest.mark.parametrize("change", [{"client": [0.0, np.nan]}, {"loss": ["<script>", "1"]}])
def test_columns_of_another_type_are_left_out(change: dict[str, list[Any]], make_run, tmp_path: Path) -> None:
    run = make_run(rounds=2)
    good = {"round": [1, 1], "client": [0, 1], "p": [0.5, 0.5], "loss": [1.0, 2.0]}
    pd.DataFrame(good | change).to_parquet(run / "mixing.parquet")
    assert "<script>" not in Reader(build([run], tmp_path / "out")).text


def test_the_head_tells_one_run_from_several_and_the_heterogeneity_of_the_partition(make_run, tmp_path: Path) -> None:
    single = build([make_run(method="feddyn", rounds=2)], tmp_path / "one").read_text()
    assert "<h1>Run of feddyn</h1>" in single
    assert "dirichlet, alpha 0.3" in single
    several = build([make_run(rounds=2), make_run(method="x", rounds=2)], tmp_path / "two").read_text()
    assert "<h1>Comparison of runs</h1>" in several


def test_levels_and_what_clients_deploy_have_sections_of_their_own(make_run, tmp_path: Path) -> None:
    run = make_run(method="fedhen", scopes=("global", "global/simple", "clients", "average/simple"))
    page = build([run], tmp_path / "levels")
    text = Reader(page).text
    titles = [
        "Server model on the common test set",
        "Server model of level simple on the common test set",
        "Deployed models on the clients' own test data",
        "Average of the last models of the clients of level simple",
    ]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert "global_simple_accuracy" in {figure["name"] for figure in figures_of(page)}

    ditto = make_run(method="ditto")
    summary = json.loads((ditto / "summary.json").read_text())
    (ditto / "summary.json").write_text(json.dumps({**summary, "headline": "clients/accuracy/mean"}))
    text = Reader(build([ditto, run], tmp_path / "own")).text
    assert text.index("Deployed models on the clients' own test data") < text.index(
        "Server model on the common test set"
    )


def test_warnings_of_runs_lead_the_results_and_hidden_lines_are_named(make_run, tmp_path: Path) -> None:
    runs = [make_run(), make_run(method="fedprox"), make_run(method="feddyn", rate=0.4)]
    for run in runs[:2]:
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps(summary | {"warnings": ["the model diverged."]}))
    text = build(runs, tmp_path / "out").read_text()
    results = text[text.index('<section id="results">') : text.index('<section id="curves">')]
    assert '<p class="warn">fedavg; fedprox: the model diverged.</p>' in results
    assert "Under another line: fedavg, under fedprox." in text
