"""The figures of a report: curves, clients, mixing coefficients, regret, calibration, the partition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.metrics import direction
from fedloom_apps.report.charts import (
    Axis,
    Chart,
    Figure,
    Floats,
    Form,
    Gantt,
    HeatMap,
    LineStyle,
    Network,
    Series,
    slug,
    slugs,
    thinned,
)
from fedloom_apps.report.groups import Band, RunGroup, all_runs, band, form_of, has, on_the_same_data, series, targets
from fedloom_apps.report.runs import NOTHING, WALL, Curve, RunData, Table, chosen, is_number, total_by_client
from fedloom_apps.report.tables import Scope, client_metric, measured, scopes

ROUNDS = Axis("rounds", "count")
OVER = {
    "privacy/epsilon": Axis("ε of a client"),
    "comm/bytes": Axis("bytes sent", "amount"),
    "passes": Axis("student passes", "count"),
    "clock": Axis("time on the devices", "seconds"),
    WALL: Axis("wall-clock time", "seconds"),
}
"""The other horizontal axes of curves, by the metric that they show."""

OBJECTIVE = "mixing/objective"
HELD_OUT_OBJECTIVE = "mixing/held_out_objective"
"""Σ p_i F_i(θ^t) over a round's clients, with the losses of the received model."""

CONSENSUS = "consensus/distance"

MATRICES, CLIENTS_DRAWN, COLUMNS = 8, 100, 200
"""The most heat maps of one kind, clients in one of mixing coefficients, and columns of any."""

_ACCURACY = Axis("accuracy", "percent")
_OTHERS: tuple[tuple[str, str, str, Form], ...] = (
    ("synthetic/accuracy", "Classifier trained on the synthetic set", "accuracy", "percent"),
    ("synthetic/recognised", "Synthetic samples recognised by a classifier of real data", "recognised", "percent"),
    ("synthetic/fid", "FID of the synthetic set", "FID", "number"),
    ("synthetic/diversity", "Diversity within classes, synthetic over real", "diversity", "number"),
    ("memory/task_bytes", "Stored task data", "bytes", "amount"),
    ("privacy/epsilon", "Privacy spent", "ε", "number"),
)


def bands(groups: Sequence[RunGroup]) -> str:
    """The sentence on lines and bands."""
    if all(len(member.runs) == 1 for member in groups):
        return "One run each."
    return "Lines are means over seeds; bands reach from the lowest to the highest seed."


def line(member: RunGroup, band: Band, others: Sequence[Floats] = ()) -> Series:
    """A group's line from its ``band``, with its positions on other axes; thinned."""
    kept = thinned(len(band))
    ends = (band.low[kept], band.high[kept]) if len(member.runs) > 1 else ((), ())
    return Series(member.label, member.style, [x[kept] for x in (band.x, *others)], band.mean[kept], *ends)


def metric(groups: Sequence[RunGroup], key: str, heading: str, y: Axis, name: str = "") -> Chart:
    """A metric over rounds and other recorded counts; the target is marked."""
    over = {source: axis for source, axis in OVER.items() if has(groups, source)}
    lines = []
    for member in groups:
        drawn = series(member, key)
        means = (series(member, source) for source in over)
        if len(drawn):
            lines.append(line(member, drawn, [Curve(other.x, other.mean).at(drawn.x) for other in means]))
    if y.form == "number":
        values = np.concatenate([np.zeros(0), *(line.y for line in lines)])
        y = replace(y, log=len(values) > 0 and bool(0 < values.min() < values.max() / 30))
    goal = {target.metric: target.value for target in targets(groups)}.get(key)
    level = None if goal is None else ("target", goal)
    if level is None and key == "global/accuracy":  # of distilled students
        teachers = [run.summary.get("teacher") for run in all_runs(groups)]
        known = [teacher.get("accuracy") for teacher in teachers if isinstance(teacher, Mapping)]
        level = next((("teacher", float(value)) for value in known if is_number(value)), None)
    x = [replace(ROUNDS, label="tasks") if key[:3] in ("ctm", "ltm") else ROUNDS, *over.values()]
    return Chart(name or slug(key), heading, bands(groups), x, y, lines, level=level)


def curves(groups: Sequence[RunGroup], scope: Scope) -> Iterator[Chart]:
    """The metrics of one evaluation."""
    for name, key, form, _ in measured(groups, scope):
        yield metric(groups, key, f"{scope.title}: {name}", Axis(name, form), f"{scope.name}_{slug(name)}")


def all_curves(groups: Sequence[RunGroup]) -> Iterator[Figure]:
    """All evaluations, then what single tasks record."""
    for scope in scopes(groups):
        yield from curves(groups, scope)
    for key, heading, label, form in _OTHERS:
        if has(groups, key):
            yield metric(groups, key, heading, Axis(label, form))


# --- clients


def distribution(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """The quantile curve of the clients' metric over the clients of all seeds."""
    metric, lines = client_metric(groups), []
    for member in groups:
        pooled = np.sort(np.concatenate([run.by_client(metric).known.y for run in member.runs]))
        if len(pooled):
            kept = thinned(len(pooled))
            lines.append(Series(member.label, member.style, [(kept + 0.5) / len(pooled)], pooled[kept]))
    if lines:
        caption = (
            f"The share of clients with at most this {metric}, in the last evaluated round, clients of all seeds "
            f"together: the left end is the {'worst' if direction(metric) == 'max' else 'best'} client, the middle the "
            "median."
        )
        share, y = Axis("share of clients", "percent"), Axis(f"{metric} of a client", form_of(metric))
        yield Chart("clients_distribution", f"{metric.capitalize()} over clients", caption, [share], y, lines)


def gains(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """Each client's metric against its value in the runs of FedAvg, and of local training, with the same seed."""
    metric = client_metric(groups)
    up, form = direction(metric) == "max", form_of(metric)
    baselines = [member for member in groups if member.method in ("fedavg", "local")]
    for baseline, suffix in zip(baselines, slugs(member.label for member in baselines), strict=True):
        before = {run.seed: run.by_client(metric) for run in baseline.runs}
        clouds, better = [], []
        for member in groups:
            points = [
                (x, y, f"client {client:.0f}, seed {run.seed}")
                for run in member.runs
                if member is not baseline and run.seed in before and on_the_same_data(member, baseline)
                for client, x, y in with_both(before[run.seed], run.by_client(metric))
            ]
            if not points:
                continue
            gained = [y > x if up else y < x for x, y, _ in points]
            better.append(f"{member.label}: {100 * np.mean(gained):.0f} %")
            x, y, names = zip(*(points[place] for place in thinned(len(points))), strict=True)
            clouds.append(Series(member.label, member.style, [np.array(x)], np.array(y), names=names))
        if clouds:
            caption = (
                f"Each point is a client with the same data in both runs; {'above' if up else 'below'} the dashed line "
                f"it gains over {baseline.label}. Clients that gain: {'; '.join(better)}."
            )
            x, y = Axis(f"{metric} with {baseline.label}", form), Axis(f"{metric} of a client", form)
            heading, name = f"Gain of each client over {baseline.label}", f"gain_over_{suffix}"
            yield Chart(name, heading, caption, [x], y, clouds, points=True, diagonal=True)


def with_both(before: Curve, after: Curve) -> Iterator[tuple[float, float, float]]:
    """The clients that have a value in both of two runs, with the two values."""
    clients = np.intersect1d(before.known.x, after.known.x)
    yield from zip(*(values.tolist() for values in (clients, before.at(clients), after.at(clients))), strict=True)


def interpolation(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """Accuracy of the models (1 - λ)w + λv between the server's w and each client's v, in the last evaluated round."""
    lines = []
    for member in groups:
        curves = []
        for run in member.runs:
            found = [
                (float(match[1]), values.y[-1]) for k, values in run.columns.items() if (match := _LAMBDA.fullmatch(k))
            ]
            curves.append(Curve(*np.array(found, dtype=np.float64).reshape(-1, 2).T))
        if any(map(len, curves)):
            lines.append(line(member, band(curves)))
    if lines:
        caption = (
            "Mean accuracy over clients of the interpolation (1 - λ)w + λv of the server's model w and the client's "
            f"own v: λ = 0 is the server's model, λ = 1 the client's own. {bands(groups)}"
        )
        yield Chart("lambda", "Accuracy against λ", caption, [Axis("λ")], _ACCURACY, lines)


_LAMBDA = re.compile(r"lambda/(\d+(?:\.\d+)?)/accuracy/mean")


def reliability(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """Accuracy against confidence of the server's model and of the clients' in the last evaluated round."""
    for scope, name, heading, what in (
        ("global", "reliability", "Reliability diagram", "Of the server model on the common test set"),
        ("clients", "reliability_clients", "Reliability diagram, clients' models", "Of the models that clients deploy, "
         "each on the client's own test samples, all samples together"),
    ):  # fmt: skip
        clouds = []
        for member in groups:
            share, sure, right = member.runs[0].bins(scope).T
            if len(share):
                error = float(np.sum(share * np.abs(right - sure)))
                names = [f"{100 * s:.3g} % of samples" for s in share]
                label = f"{member.label} (ECE {100 * error:.1f} %)"
                clouds.append(Series(label, member.style, [sure], right, names=names, shares=share))
        caption = (
            f"{what}, in 15 bins, each a disc whose area is its share of the samples: below the dashed line confidence "
            "is too high. First seed of each group; ECE is the expected calibration error, the mean distance from the "
            "dashed line by these shares."
        )
        if clouds:
            x = Axis("confidence", "percent")
            yield Chart(name, heading, caption, [x], _ACCURACY, clouds, points=True, diagonal=True)


def guides(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """Histograms of a distillation guide's g over samples on which the student is right, and on which it is wrong."""
    for member, suffix in zip(groups, slugs(member.label for member in groups), strict=True):
        table = member.runs[0].guide
        if not table:
            continue
        lines = []
        for right, label, colour in ((True, "student is right", "#0072B2"), (False, "student is wrong", "#D55E00")):
            g = table["g"][table["right"] == right]
            share = np.histogram(g, bins=20, range=(0, 1))[0] / max(len(g), 1)
            lines.append(Series(label, LineStyle(colour), [np.arange(0.025, 1, 0.05)], share))
        caption = "Shares of the training samples in 20 bins of the guide's g; the more the two differ, the better."
        heading, name = f"Guide of {member.label}", f"guide_{suffix}"
        yield Chart(name, heading, caption, [Axis("g")], Axis("share of samples", "percent"), lines)


def partitions(groups: Sequence[RunGroup]) -> Iterator[HeatMap]:
    """Labels by client, once for every distinct partition of the first seeds."""
    drawn: list[Floats] = []
    for member in groups:
        table = member.runs[0].partition
        if not table:
            continue
        labels, row = np.unique(table["label"], return_inverse=True)
        clients = int(table["client"].max()) + 1
        kept = thinned(clients, COLUMNS)
        z, shown = np.zeros((len(labels), len(kept))), np.isin(table["client"], kept)
        np.add.at(z, (row[shown], np.searchsorted(kept, table["client"][shown])), table["samples"][shown])
        if len(drawn) == MATRICES or any(np.array_equal(z, matrix) for matrix in drawn):
            continue
        drawn.append(z)
        caption = f"Training samples of each label at each client, seed {member.runs[0].seed}."
        if len(kept) < clients:
            caption += f" {len(kept)} of {clients} clients, evenly chosen."
        heading = "Partition" + (f", {member.label}" if len(drawn) > 1 else "")
        name = "partition" + (f"_{len(drawn)}" if len(drawn) > 1 else "")
        rows, columns = ([str(item) for item in axis] for axis in (labels, kept))
        yield HeatMap(name, heading, caption, "client", "label", columns, rows, z, "count")


# --- mixing


def pivot(mixing: Table, column: str) -> tuple[NDArray[Any], NDArray[Any], Floats]:
    """The clients [n] and rounds [m] of ``mixing.parquet``, and one of its columns [n, m].

    It is NaN where a client did not participate.
    """
    clients, row = np.unique(mixing["client"], return_inverse=True)
    rounds, place = np.unique(mixing["round"], return_inverse=True)
    values = np.full((len(clients), len(rounds)), np.nan)
    values[row, place] = mixing[column]
    return clients, rounds, values


def mixing_matrices(groups: Sequence[RunGroup]) -> Iterator[HeatMap]:
    """K · p by round, of the first run of each group with several rounds, at most 100 clients and unequal weights."""
    caption = (
        "The weight of each client's update, times the number K of clients in that round: 1 if all weigh the same, "
        "orange above, blue below; grey where a client did not take part. Methods with equal weights are left out."
    )
    count = 0
    for member in groups:
        for run in member.runs:
            if not run.mixing:
                continue
            clients, rounds, p = pivot(run.mixing, "p")
            z = p * (~np.isnan(p)).sum(axis=0)
            if len(rounds) > 1 and len(clients) <= CLIENTS_DRAWN and count < MATRICES and (z > 1 + 1e-6).any():
                count += 1
                kept = thinned(len(rounds), COLUMNS)
                heading = f"Mixing coefficients of {member.label}" + f", seed {run.seed}" * (len(member.runs) > 1)
                columns, rows = ([str(item) for item in axis] for axis in (rounds[kept], clients))
                drawn = z[:, kept]
                yield HeatMap(f"mixing_{count}", heading, caption, "round", "client", columns, rows, drawn, middle=1.0)
                break


# --- topology

NODES = 200
"""The most models in a graph."""


def networks(groups: Sequence[RunGroup]) -> Iterator[Figure]:
    """The graph of each group's first run where it is known, each once; then the distance from agreement."""
    drawn: list[Floats] = []
    for member in groups:
        run = member.runs[0]
        if not (table := run.topology):
            continue
        ends = np.stack([table["model"], table["source"]], axis=1).astype(np.int64)
        if not 0 <= ends.min() <= ends.max() < NODES:
            continue
        matrix = np.zeros((ends.max() + 1, ends.max() + 1))
        np.add.at(matrix, (*ends.T,), table["weight"])
        rounds = len(np.unique(table["round"]))
        matrix /= rounds
        if len(drawn) == MATRICES or any(np.array_equal(matrix, other) for other in drawn):
            continue
        drawn.append(matrix)
        caption = "Who talks to whom; the stronger a line, the larger its weight."
        caption += f" {rounds} rounds together." * (rounds > 1)
        about = run.summary.get("topology")
        if isinstance(about, Mapping) and isinstance(gap := about.get("spectral_gap"), int | float):
            caption += f" Spectral gap {gap:.3g}."
        yield Network.of(f"network_{len(drawn)}", f"Graph of {member.label}", caption, matrix)
    if has(groups, CONSENSUS):
        axis = Axis("Σ‖θ_i − θ̄‖²/K")
        yield metric(groups, CONSENSUS, "Distance of the clients' models from their mean", axis)


# --- time

ROWS, ROUNDS_DRAWN = 40, 5
"""The most clients in a Gantt chart, and the rounds that it shows, or as many clients' work."""


def gantts(groups: Sequence[RunGroup]) -> Iterator[Gantt]:
    """Who works when at the beginning of the first run of each group that has devices."""
    members = [member for member in groups if {"begin", "end"} <= member.runs[0].mixing.keys()]
    for number, member in enumerate(members[:MATRICES], start=1):
        run = member.runs[0]
        last = run.mixing["round"][: int(ROUNDS_DRAWN * (run.cohort_size or 1))].max()
        work = chosen(run.mixing, run.mixing["round"] <= last)
        names, row = np.unique(work["client"], return_inverse=True)
        drawn = thinned(len(names), ROWS)
        place = np.full(len(names), -1)
        place[drawn] = np.arange(len(drawn))
        work, row = chosen(work, place[row] >= 0), place[row][place[row] >= 0]
        late = work["late"].astype(bool) if "late" in work else np.zeros(len(row), bool)
        last = int(work["round"].max())
        clock = run.curve("clock")
        caption = (
            "Bars are clients' work, from invitation to its end; vertical lines are server steps. Orange work is "
            f"thrown away. Seed {run.seed}, the first {last} steps"
            + (f", {len(drawn)} of {len(names)} clients." if len(drawn) < len(names) else ".")
        )
        steps = clock.y[clock.x <= last]
        labels = [str(names[i]) for i in drawn]
        begin, end = (work[name].astype(np.float64) for name in ("begin", "end"))
        yield Gantt(f"gantt_{number}", f"Work of {member.label}", caption, labels, row, begin, end, late, steps)


def cumulated(run: RunData) -> Curve:
    """Σ_{τ≤t} Σ_i p_i F_i(θ^τ) by round; a round without a value adds nothing."""
    values = run.curve(OBJECTIVE)
    return Curve(values.x, np.where(np.isfinite(values.y), values.y, 0.0).cumsum())


def cumulated_band(member: RunGroup) -> Band:
    """The cumulative objective of a group, over the rounds that all its seeds have reached."""
    sums = [total for run in member.runs if len(total := cumulated(run))]
    common = np.array(sorted(set.intersection(*({*total.x.tolist()} for total in sums))))
    return band([Curve(common, total.at(common)) for total in sums])


def objectives(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """The objective in each round, and cumulative (Hahn 2024, figure 3.1: smaller is better)."""
    caption = (
        "The {} losses of the model that a round's clients received, weighted by the coefficients that then mixed "
        "their updates. Smaller is better. " + bands(groups)
    )
    each: tuple[tuple[str, str, str, str, Callable[[RunGroup], Band]], ...] = (
        (OBJECTIVE, "objective", "Global objective in each round", "training", partial(series, key=OBJECTIVE)),
        (OBJECTIVE, "objective_cumulated", "Global objective, cumulated", "training", cumulated_band),
        (HELD_OUT_OBJECTIVE, "objective_held_out", "Global objective on validation samples in each round", "validation",
         partial(series, key=HELD_OUT_OBJECTIVE)),
    )  # fmt: skip
    for key, name, heading, kind, values in each:
        lines = [line(member, values(member)) for member in groups if has([member], key)]
        if lines:
            yield Chart(name, heading, caption.format(kind), [ROUNDS], Axis("Σ p F"), lines)


def decisions(run: RunData) -> tuple[Floats, Floats] | None:
    """P and F(θ^t), float64 [T, K] each, if ``mixing.parquet`` has both for all clients in all rounds, else None.

    F are the losses that the policy saw: on validation samples, if it takes its responses there.
    """
    loss_column = next((column for column in ("held_out_loss", "loss") if column in run.mixing), None)
    if loss_column is None:
        return None
    p, losses = (pivot(run.mixing, column)[2] for column in ("p", loss_column))
    complete = p.shape == losses.shape and np.isfinite(p).all() and np.isfinite(losses).all()
    return (p.T, losses.T) if len(p) > 1 and complete else None


def transformation(run: RunData):
    """Name, scale and shape of the CDF in the run's mixing policy; the normal CDF if it has none."""
    from fedloom.parts.mixing.responses import CDFS  # few pages show a regret

    stored = dict(re.findall(r"(\w+)='?([\w.+-]+)", str(run.facts.get("method.mixing", ""))))
    for name in CDFS:
        if name == stored.get("cdf"):
            with suppress(KeyError, ValueError):  # a policy whose settings cannot be read
                return name, float(stored["scale"]), float(stored["shape"])
    return "normal", 1.0, 0.0


def prior(run: RunData, decided: Floats) -> Floats | None:
    """p^1 [K] for the decisions [T, K] of a run: what never changes, or n_i/n if the policy starts there; else None."""
    if (decided == decided[0]).all():
        return decided[0]
    if "prior='samples'" not in str(run.facts.get("method.mixing", "")) or not run.partition:
        return None
    sizes = total_by_client(run.partition, "samples").at(np.unique(run.mixing["client"]))
    return sizes / sizes.sum() if np.isfinite(sizes).all() else None


def regret_curve(run: RunData) -> Curve:
    """Σ_{τ≤t} ℓ_τ(p^τ) - ℓ_τ(p*) by round, with p* the best fixed p of the whole run; empty if losses are missing.

    All policies are evaluated with responses in [0, 1/K], as in AAggFF for silos.
    """
    known = decisions(run)
    if known is None:
        return NOTHING
    from fedloom.metrics.regret import played, regret_of_losses
    from fedloom.parts.mixing.responses import respond

    p, losses = known
    cdf, scale, shape = transformation(run)
    answer = partial(respond, cdf=cdf, scale=scale, shape=shape, low=0.0, high=1 / p.shape[1])
    values = regret_of_losses(played(p, prior(run, p)), losses, answer)
    return Curve(np.arange(1.0, len(values) + 1), values)


def with_regret(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The groups, reduced to runs whose regret is known; groups without such runs are left out."""
    kept = [replace(g, runs=tuple(run for run in g.runs if decisions(run) is not None)) for g in groups]
    return [member for member in kept if member.runs]


def regrets(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """The regret of each group; the bound of Hahn 2024, theorem 3.1, which is far above it, is in the caption."""
    curves = with_regret(groups)
    lines = [line(g, band([regret_curve(run) for run in g.runs])) for g in curves]
    if lines:
        from fedloom.metrics.regret import lipschitz, silo_bound

        bounds = dict.fromkeys((len(np.unique(run.mixing["client"])), run.last_round) for run in all_runs(curves))
        said = [f"{silo_bound(t, k, lipschitz(0.0, 1 / k)):.3g} after {t} rounds with {k} clients" for k, t in bounds]
        caption = (
            "What the mixing coefficients lost, in decision losses -log(1 + ⟨p, r⟩), against the best fixed ones of "
            f"the whole run, where all clients' losses are known. The bound of theorem 3.1 is {'; '.join(said)}. "
            + bands(curves)
        )
        yield Chart("regret", "Regret", caption, [ROUNDS], Axis("regret, cumulated"), lines)
