"""The decision table against the stored results: every figure that it quotes is computed again."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fedloom_apps.claims.comparisons import Figure
from fedloom_apps.claims.register import read_claim

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/howto/choose.md").read_text().split())


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    for name in ("protocol", "reporting", "claims"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import protocol

    return protocol


def page_figure(number: str) -> str:
    """As the page prints it: without the zero before the point."""
    return number.replace(" 0.", " .").removeprefix("+")


@pytest.mark.parametrize(
    ("data", "method", "text"),
    [
        ("mnist_writers", "FedMGDA+", "{} over FedAvg's average, but not on the other two"),
        ("fashion_dirichlet", "AAggFF, visits", "{} over FedAvg's average in the worst tenth"),
    ],
)
def test_averaged_models_that_serve_the_worst_devices(protocol: Any, data: str, method: str, text: str) -> None:
    stored = protocol.read_results("fair/device")
    runs = {name: stored["data"][data]["runs"][name] for name in (method, "FedAvg")}
    worst = {name: {s: run["averaged"]["worst10"] for s, run in seeds.items()} for name, seeds in runs.items()}
    gain, _, _ = protocol.format_gain(worst[method], worst["FedAvg"], 100).partition(" (")
    assert text.format(page_figure(gain)) in PAGE


FAIR = ("AFL", "q-FedAvg", "TERM", "PropFair", "AAggFF")


def worst_of(protocol: Any, file: str, data: str) -> dict[str, dict[str, float]]:
    """The worst tenth's metric with the last model, by method and seed."""
    runs = protocol.read_results(f"fair/{file}")["data"][data]["runs"]
    return {name: {s: run["worst10"] for s, run in seeds.items()} for name, seeds in runs.items()}


def test_on_losses_of_training_samples_no_fair_method_beats_the_better_weights(protocol: Any) -> None:
    """No interval of the paired differences from weights by samples, or from equal ones, lies above 0."""
    places = [("device", data) for data in ("mnist_writers", "fashion_dirichlet", "minority")]
    places += [("silo", data) for data in ("heart_published", "six_silos")]
    for file, data in places:
        worst = worst_of(protocol, file, data)
        better = max(("FedAvg", "uniform"), key=lambda name: sum(worst[name].values()) / len(worst[name]))
        for name in FAIR:
            if name in worst:
                assert protocol.paired(worst[name], worst[better])["low"] <= 0, (data, name)
    worst = worst_of(protocol, "device", "mnist_writers")
    assert all(protocol.paired(worst[name], worst["FedAvg"])["low"] <= 0 for name in FAIR if name in worst)
    assert "no fair method beats sample weights for the worst tenth of MNIST's writers" in PAGE
    assert "no fair method beat the better of weights by samples and equal weights" in PAGE


def test_what_helped_the_worst_of_six_silos(protocol: Any) -> None:
    runs, worst = (
        protocol.read_results("fair/silo")["data"]["six_silos"]["runs"],
        worst_of(protocol, "silo", "six_silos"),
    )

    def gain(name: str, rival: str, key: str) -> str:
        values, rival_values = ({s: run[key] for s, run in runs[method].items()} for method in (name, rival))
        return page_figure(protocol.format_gain(values, rival_values, 100).partition(" (")[0]).removeprefix("-")

    assert f"equal weights on six unequal silos ({gain('uniform', 'FedAvg', 'worst10')} points" in PAGE
    held_out = "AAggFF, held out"
    assert f"{gain(held_out, 'uniform', 'worst10')} more by responses on held-out samples" in PAGE
    assert f"at a cost of {gain(held_out, 'uniform', 'mean')} in the average" in PAGE
    assert f"or {gain('FedMGDA+', 'uniform', 'worst10')} by FedMGDA+ without a cost" in PAGE
    means = {name: {s: run["mean"] for s, run in seeds.items()} for name, seeds in runs.items()}
    assert protocol.paired(means["FedMGDA+"], means["uniform"])["mean"] > 0
    for method in ("AAggFF", "AAggFF, samples"):  # why neither is in the table
        assert protocol.paired(worst[method], worst["uniform"])["high"] < 0


def test_where_fedmgda_does_not_help(protocol: Any) -> None:
    gains = []
    for data in ("fashion_dirichlet", "minority"):
        runs, last = protocol.read_results("fair/device")["data"][data]["runs"], worst_of(protocol, "device", data)
        assert min(last, key=lambda name: sum(last[name].values())) == "FedMGDA+"
        both = ({s: run["averaged"]["worst10"] for s, run in runs[name].items()} for name in ("FedMGDA+", "FedAvg"))
        gains.append(page_figure(protocol.format_gain(*both, 100).partition(" (")[0]))
    assert f"({gains[0]} and {gains[1]}), where its last model is the worst of all" in PAGE


def test_few_of_many_clients(protocol: Any) -> None:
    runs = protocol.read_results("fair/plug_and_play")["data"]["fashion_dirichlet"]["runs"]
    both = ({s: run["mean"] for s, run in runs[name]["alone"].items()} for name in ("FedAdagrad", "FedAvg"))
    gain = page_figure(protocol.format_gain(*both, 100).partition(" (")[0])
    assert f"FedAdagrad is {gain} points more accurate than FedAvg (" in PAGE
    runs = protocol.read_results("fair/device")["data"]["fashion_dirichlet"]["runs"]["FedAvg"]
    averaged, last = {s: r["averaged"]["mean"] for s, r in runs.items()}, {s: r["mean"] for s, r in runs.items()}
    gain = page_figure(protocol.format_gain(averaged, last, 100).partition(" (")[0])
    assert f"(`evaluation.server_average=0.97`) {gain} more than its last one" in PAGE


def test_what_searches_over_all_methods_end_with(protocol: Any) -> None:
    searches = [
        seeds for data in protocol.read_results("search/compositions")["runs"].values() for seeds in data.values()
    ]
    ends = [run["label"] for seeds in searches for run in seeds.values()]
    count = sum(label.startswith(("knn_per", "fedrod")) for label in ends)
    assert f"{count} of {len(ends)} [searches]" in PAGE


def test_moml_without_its_vector_is_level(protocol: Any) -> None:
    runs = protocol.read_results("online/s_mnist")["runs"]["Hedge"]
    for figure in (lambda run: sum(run["ctm"]) / len(run["ctm"]), lambda run: run["ltm"][-1][1]):
        both = [{seed: figure(run) for seed, run in runs[name].items()} for name in ("MOML", "MOML ∇=0")]
        gain = protocol.paired(*both)
        assert gain["low"] <= 0 <= gain["high"]
        assert abs(gain["mean"]) < 0.002


def test_all_clients_in_every_round(protocol: Any) -> None:
    def rounds(file: str, target: float) -> dict[str, str]:
        """The rounds of each method to a target."""
        figures = {}
        for name, seeds in protocol.read_results(f"claims/{file}")["runs"].items():
            curves = [run["curves"]["average/accuracy"] for run in seeds.values()]
            first = [next(r for r, value in enumerate(curve, 1) if value >= target) for curve in curves]
            figures[name] = page_figure(protocol.mean_error(first, 1, 1))
        return figures

    iid, skewed = rounds("mnist_iid_all_972", 0.972), rounds("mnist_dir6_all_971", 0.971)
    more = rounds("mnist_dir3_all_971", 0.971)
    for text in (
        "FedDyn takes {FedDyn} rounds to 97.2 % on MNIST, IID, as many as SCAFFOLD ({SCAFFOLD})".format(**iid),
        "FedAvg takes {FedAvg} and FedProx {FedProx}".format(**iid),
        "{FedDyn} rounds to 97.1 %, SCAFFOLD {SCAFFOLD}, FedAvg {FedAvg} and FedProx {FedProx}".format(**skewed),
        "with .3 it takes {FedDyn}, SCAFFOLD {SCAFFOLD}, FedAvg {FedAvg} and FedProx {FedProx}".format(**more),
    ):
        assert text in PAGE


def test_two_classes_a_client(protocol: Any) -> None:
    stored = protocol.read_results("superfed/table_2_3_scripts")
    for name, text in (
        ("FedPer", "{} % with FedPer"), ("SuPerFed-MM", "{} with SuPerFed-MM"), ("Ditto", "{} with Ditto"),
        ("FedAvg", "FedAvg has {}"),
    ):  # fmt: skip
        values = protocol.find(stored, f"runs > 500 > {name} > * > validation > mean > -1").values()
        assert text.format(page_figure(protocol.mean_error(values, 100, 2))) in PAGE
    stored = protocol.read_results("claims/superfed_mnist_50_scripts")
    for name, text in (
        *((name, f"{{}} with {name}") for name in ("FedPer", "Ditto", "FedRep", "APFL", "SuPerFed-MM")),
        ("SCAFFOLD", "SCAFFOLD has {}"), ("FedProx", "FedProx {}"),
    ):  # fmt: skip
        values = protocol.find(stored, f"runs > {name} > * > curves > clients/accuracy/mean > -1").values()
        assert text.format(page_figure(protocol.mean_error(values, 100, 2))) in PAGE


def test_a_head_for_the_targets_shares_beats_fedavg_in_every_cell(protocol: Any) -> None:
    cells = [
        cell
        for splits in protocol.read_results("ssa/heads")["runs"].values()
        for targets in splits.values()
        for cell in targets.values()
    ]
    better = sum(cell["target_head"] > cell["FedAvg"] for cell in cells)
    assert f"better than FedAvg in {better} of {len(cells)} cells" in PAGE


def test_transmissions_of_feddyn(protocol: Any) -> None:
    import claims

    stored = protocol.read_results("feddyn/mnist_dirichlet")
    sent = {
        name: [
            claims.transmissions_to(0.982)(run, stored) for run in protocol.find(stored, f"runs > {name} > *").values()
        ]
        for name in ("FedDyn", "FedAvg")
    }
    assert f"{min(sent['FedDyn'])} to {max(sent['FedDyn'])} rounds of FedAvg's communication to 98.2 %" in PAGE
    assert all(isinstance(count, protocol.AtLeast) for count in sent["FedAvg"])
    overview = (ROOT / "docs/reproduction.md").read_text().split("\n| **all**")[0].splitlines()
    rows = [
        line.split("|")[1:5] for line in overview if re.match(r"\| \[FedDyn on E?MNIST", line) and ", 1 %" not in line
    ]
    reproduced, comparisons = (sum(int(row[column]) for row in rows) for column in (2, 1))
    assert f"{reproduced} of {comparisons} published comparisons are reproduced" in PAGE
    runs = read_claim(ROOT / "recipes/claims/emnist_dir6.yaml").results()["runs"]
    transmissions = Figure("transmissions", "average/accuracy", 0.949)
    sent = {name: [transmissions(run, {}) for run in by_seed.values()] for name, by_seed in runs.items()}
    assert f"it takes {protocol.mean_error(sent['FedDyn'], digits=0)} to 94.9 %" in PAGE
    assert all(isinstance(count, protocol.AtLeast) for name in sent.keys() - {"FedDyn"} for count in sent[name])


def test_feddyn_with_one_client_in_a_hundred() -> None:
    verdicts = (ROOT / "docs/reproduction.md").read_text()
    sections = re.findall(r"^## (FedDyn on .*, 1 % of the clients.*)\n((?:(?!## ).*\n)*)", verdicts, re.M)
    comparisons = {
        (title.removeprefix("FedDyn on ").partition(", 1 %")[0], *claim): (figures, verdict)
        for title, rows in sections
        for *claim, figures, verdict in re.findall(
            r"FedDyn needs fewer transmissions than (\w+) to reach ([\d.]+) % \| [^|]* \| ([^|]*) \|"
            r".*\| \**([a-z ]+)\** \|",
            rows,
        )
    }
    ahead = {
        claim: verdict in ("reproduced", "only the order reproduced") for claim, (_, verdict) in comparisons.items()
    }
    scaffold = [ahead[claim] for claim in ahead if claim[1] == "SCAFFOLD"]
    assert f"ahead of SCAFFOLD in {sum(scaffold)} of {len(scaffold)} comparisons" in PAGE
    feddyn, fedavg = comparisons["MNIST, IID", "FedAvg", "98.3"][0].split(" : ≥ ")
    assert f"{feddyn} transmissions where FedAvg takes {fedavg} or more" in PAGE
    of_fedavg = {claim[0]: [] for claim in ahead}
    for (data, rival, _), holds in sorted(ahead.items(), key=lambda item: float(item[0][2])):
        if rival == "FedAvg":
            of_fedavg[data].append(holds)
    assert of_fedavg["MNIST, IID"] == of_fedavg["MNIST, Dirichlet .6"] == [True, True]
    assert not any(of_fedavg["EMNIST-L, IID"])
    for data in ("MNIST, Dirichlet .3", "EMNIST-L, Dirichlet .6", "EMNIST-L, Dirichlet .3"):
        assert of_fedavg[data] == [True, False]
    where = ("FedDyn on MNIST, IID", "FedDyn on MNIST, Dirichlet .6")
    rows = "".join(rows for title, rows in sections if title.startswith(where))
    orders = re.findall(r"\| (\w+) needs fewer transmissions than (\w+) to .*\| \**([a-z ]+)\** \|", rows)
    of_fedprox = {(first, verdict) for first, second, verdict in orders if "FedProx" in (first, second)}
    assert of_fedprox == {("FedDyn", "reproduced"), ("FedProx", "not reproduced")}


def test_every_link_to_a_result_is_one() -> None:
    links = [part.partition(")")[0] for part in PAGE.split("](")[1:]]
    results = [link for link in links if "/results/" in link]
    assert len(results) >= 8
    for link in results:
        assert (ROOT / "docs/howto" / link).resolve().with_suffix(".json").is_file(), link


EVERY_CLIENT = {
    "personal_mnist": {
        "classes": ("kNN-Per", "Ditto", "local", "FedAvg"),
        "dirichlet": ("kNN-Per", "APPLE", "FedALA", "Ditto", "FedPer", "local", "FedAvg"),
    },
    "personal_cifar10": {
        "classes": ("FedPAC", "kNN-Per"),
        "dirichlet": ("FedALA", "FedPAC", "FedPer", "kNN-Per", "local"),
    },
}


@pytest.mark.parametrize("data", EVERY_CLIENT)
def test_a_model_for_every_client(protocol: Any, data: str) -> None:
    cells = protocol.read_results(f"topology/{data}")["cells"]
    for split, names in EVERY_CLIENT[data].items():
        means = {name: [run["mean"] for run in runs.values()] for name, runs in cells[split].items()}
        for name in names:
            assert page_figure(" " + protocol.mean_error(means[name], 100))[1:] in PAGE
        assert max(means, key=lambda name: sum(means[name])) == names[0]
    if data == "personal_mnist":
        for runs in cells.values():
            assert max(runs, key=lambda name: sum(run["worst10"] for run in runs[name].values())) == "kNN-Per"
