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
    spaced_indices,
)
from fedloom_apps.report.groups import Band, RunGroup, all_runs, band, form_of, has, on_the_same_data, series, targets
from fedloom_apps.report.runs import NOTHING, WALL, Curve, RunData, Table, is_number, select_rows, total_by_client
from fedloom_apps.report.tables import Scope, client_metric, scope_metrics, scopes

ROUNDS = Axis("rounds", "count")
EXTRA_AXES = {
    "privacy/epsilon": Axis("ε of a client"),
    "comm/bytes": Axis("bytes sent", "amount"),
    "passes": Axis("student passes", "count"),
    "clock": Axis("time on the devices", "seconds"),
    WALL: Axis("wall-clock time", "seconds"),
}
"""The other horizontal axes of curves, by the metric that they show."""

OBJECTIVE = "mixing/objective"
VALIDATION_OBJECTIVE = "mixing/validation_objective"
"""Σ p_i F_i(θ^t) over a round's clients, with the losses of the received model."""

CONSENSUS = "consensus/distance"

MATRICES, CLIENTS_DRAWN, COLUMNS = 8, 100, 200
"""The most heat maps of one kind, clients in a heat map of mixing coefficients, and columns of any heat map."""

_ACCURACY = Axis("accuracy", "percent")
_TASK_METRICS: tuple[tuple[str, str, str, Form], ...] = (
    ("synthetic/accuracy", "Classifier trained on the synthetic set", "accuracy", "percent"),
    ("synthetic/recognised", "Synthetic samples recognised by a classifier of real data", "recognised", "percent"),
    ("synthetic/fid", "FID of the synthetic set", "FID", "number"),
    ("synthetic/diversity", "Diversity within classes, synthetic over real", "diversity", "number"),
    ("memory/task_bytes", "Stored task data", "bytes", "amount"),
    ("privacy/epsilon", "Privacy spent", "ε", "number"),
)


def band_sentence(groups: Sequence[RunGroup]) -> str:
    """The sentence on lines and bands."""
    if all(len(member.runs) == 1 for member in groups):
        return "One run each."
    return "Lines are means over seeds; bands reach from the lowest to the highest seed."


def line(member: RunGroup, band: Band, positions: Sequence[Floats] = ()) -> Series:
    """A group's line from its ``band``, with its positions on other axes, at most 400 points."""
    indices = spaced_indices(len(band))
    ends = (band.low[indices], band.high[indices]) if len(member.runs) > 1 else ((), ())
    return Series(member.label, member.style, [x[indices] for x in (band.x, *positions)], band.mean[indices], *ends)


def metric(groups: Sequence[RunGroup], key: str, heading: str, y: Axis, name: str = "") -> Chart:
    """A metric over rounds and other recorded counts; the target is marked."""
    axes = {source: axis for source, axis in EXTRA_AXES.items() if has(groups, source)}
    lines = []
    for member in groups:
        seed_band = series(member, key)
        axis_bands = (series(member, source) for source in axes)
        if len(seed_band):
            positions = [Curve(axis_band.x, axis_band.mean).at(seed_band.x) for axis_band in axis_bands]
            lines.append(line(member, seed_band, positions))
    if y.form == "number":
        values = np.concatenate([np.zeros(0), *(line.y for line in lines)])
        y = replace(y, log=len(values) > 0 and bool(0 < values.min() < values.max() / 30))
    goal = {target.metric: target.value for target in targets(groups)}.get(key)
    level = None if goal is None else ("target", goal)
    if level is None and key == "global/accuracy":  # of distilled students
        teachers = [run.summary.get("teacher") for run in all_runs(groups)]
        accuracies = [teacher.get("accuracy") for teacher in teachers if isinstance(teacher, Mapping)]
        level = next((("teacher", float(value)) for value in accuracies if is_number(value)), None)
    x = [replace(ROUNDS, label="tasks") if key[:3] in ("ctm", "ltm") else ROUNDS, *axes.values()]
    return Chart(name or slug(key), heading, band_sentence(groups), x, y, lines, level=level)


def curves(groups: Sequence[RunGroup], scope: Scope) -> Iterator[Chart]:
    """The metrics of one evaluation."""
    for name, key, form, _ in scope_metrics(groups, scope):
        yield metric(groups, key, f"{scope.title}: {name}", Axis(name, form), f"{scope.name}_{slug(name)}")


def all_curves(groups: Sequence[RunGroup]) -> Iterator[Figure]:
    """The metrics of all evaluations, then those that only some kinds of runs record."""
    for scope in scopes(groups):
        yield from curves(groups, scope)
    for key, heading, label, form in _TASK_METRICS:
        if has(groups, key):
            yield metric(groups, key, heading, Axis(label, form))


# --- clients


def distribution(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """The quantile curve of the clients' metric over the clients of all seeds."""
    metric, lines = client_metric(groups), []
    for member in groups:
        pooled = np.sort(np.concatenate([run.by_client(metric).without_nan.y for run in member.runs]))
        if len(pooled):
            indices = spaced_indices(len(pooled))
            lines.append(Series(member.label, member.style, [(indices + 0.5) / len(pooled)], pooled[indices]))
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
        baseline_values = {run.seed: run.by_client(metric) for run in baseline.runs}
        clouds, win_shares = [], []
        for member in groups:
            points = [
                (x, y, f"client {client:.0f}, seed {run.seed}")
                for run in member.runs
                if member is not baseline and run.seed in baseline_values and on_the_same_data(member, baseline)
                for client, x, y in common_values(baseline_values[run.seed], run.by_client(metric))
            ]
            if not points:
                continue
            wins = [y > x if up else y < x for x, y, _ in points]
            win_shares.append(f"{member.label}: {100 * np.mean(wins):.0f} %")
            x, y, names = zip(*(points[place] for place in spaced_indices(len(points))), strict=True)
            clouds.append(Series(member.label, member.style, [np.array(x)], np.array(y), names=names))
        if clouds:
            caption = (
                f"Each point is a client with the same data in both runs; {'above' if up else 'below'} the dashed line "
                f"it gains over {baseline.label}. Clients that gain: {'; '.join(win_shares)}."
            )
            x, y = Axis(f"{metric} with {baseline.label}", form), Axis(f"{metric} of a client", form)
            heading, name = f"Gain of each client over {baseline.label}", f"gain_over_{suffix}"
            yield Chart(name, heading, caption, [x], y, clouds, points=True, diagonal=True)


def common_values(baseline_values: Curve, run_values: Curve) -> Iterator[tuple[float, float, float]]:
    """(client, baseline's value, run's value) for each client that has a value in both runs."""
    clients = np.intersect1d(baseline_values.without_nan.x, run_values.without_nan.x)
    yield from zip(
        *(values.tolist() for values in (clients, baseline_values.at(clients), run_values.at(clients))), strict=True
    )


def interpolation(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """Accuracy of the models (1 - λ)w + λv between the server's w and each client's v, in the last evaluated round."""
    lines = []
    for member in groups:
        curves = []
        for run in member.runs:
            points = [
                (float(match[1]), values.y[-1]) for k, values in run.columns.items() if (match := _LAMBDA.fullmatch(k))
            ]
            curves.append(Curve(*np.array(points, dtype=np.float64).reshape(-1, 2).T))
        if any(map(len, curves)):
            lines.append(line(member, band(curves)))
    if lines:
        caption = (
            "Mean accuracy over clients of the interpolation (1 - λ)w + λv of the server's model w and the client's "
            f"own v: λ = 0 is the server's model, λ = 1 the client's own. {band_sentence(groups)}"
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
            share, confidence, accuracy = member.runs[0].bins(scope).T
            if len(share):
                error = float(np.sum(share * np.abs(accuracy - confidence)))
                names = [f"{100 * s:.3g} % of samples" for s in share]
                label = f"{member.label} (ECE {100 * error:.1f} %)"
                clouds.append(Series(label, member.style, [confidence], accuracy, names=names, shares=share))
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
        for is_right, label, colour in ((True, "student is right", "#0072B2"), (False, "student is wrong", "#D55E00")):
            g = table["g"][table["right"] == is_right]
            share = np.histogram(g, bins=20, range=(0, 1))[0] / max(len(g), 1)
            lines.append(Series(label, LineStyle(colour), [np.arange(0.025, 1, 0.05)], share))
        caption = "Shares of the training samples in 20 bins of the guide's g; the more the two differ, the better."
        heading, name = f"Guide of {member.label}", f"guide_{suffix}"
        yield Chart(name, heading, caption, [Axis("g")], Axis("share of samples", "percent"), lines)


def partitions(groups: Sequence[RunGroup]) -> Iterator[HeatMap]:
    """Labels by client, once for every distinct partition of the first seeds."""
    matrices: list[Floats] = []
    for member in groups:
        table = member.runs[0].partition
        if not table:
            continue
        labels, row = np.unique(table["label"], return_inverse=True)
        clients = int(table["client"].max()) + 1
        client_ids = spaced_indices(clients, COLUMNS)
        z, mask = np.zeros((len(labels), len(client_ids))), np.isin(table["client"], client_ids)
        np.add.at(z, (row[mask], np.searchsorted(client_ids, table["client"][mask])), table["samples"][mask])
        if len(matrices) == MATRICES or any(np.array_equal(z, matrix) for matrix in matrices):
            continue
        matrices.append(z)
        caption = f"Training samples of each label at each client, seed {member.runs[0].seed}."
        if len(client_ids) < clients:
            caption += f" {len(client_ids)} of {clients} clients, evenly chosen."
        heading = "Partition" + (f", {member.label}" if len(matrices) > 1 else "")
        name = "partition" + (f"_{len(matrices)}" if len(matrices) > 1 else "")
        rows, columns = ([str(item) for item in axis] for axis in (labels, client_ids))
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
                indices = spaced_indices(len(rounds), COLUMNS)
                heading = f"Mixing coefficients of {member.label}" + f", seed {run.seed}" * (len(member.runs) > 1)
                columns, rows = ([str(item) for item in axis] for axis in (rounds[indices], clients))
                values = z[:, indices]
                yield HeatMap(f"mixing_{count}", heading, caption, "round", "client", columns, rows, values, middle=1.0)
                break


# --- topology

NODES = 200
"""The most models in a graph."""


def networks(groups: Sequence[RunGroup]) -> Iterator[Figure]:
    """The distinct graphs of the groups' first runs, where they are recorded; then the distance from agreement."""
    matrices: list[Floats] = []
    for member in groups:
        run = member.runs[0]
        if not (table := run.topology):
            continue
        edges = np.stack([table["model"], table["source"]], axis=1).astype(np.int64)
        if not 0 <= edges.min() <= edges.max() < NODES:
            continue
        matrix = np.zeros((edges.max() + 1, edges.max() + 1))
        np.add.at(matrix, (*edges.T,), table["weight"])
        rounds = len(np.unique(table["round"]))
        matrix /= rounds
        if len(matrices) == MATRICES or any(np.array_equal(matrix, former) for former in matrices):
            continue
        matrices.append(matrix)
        caption = "Who talks to whom; the stronger a line, the larger its weight."
        caption += f" {rounds} rounds together." * (rounds > 1)
        topology = run.summary.get("topology")
        if isinstance(topology, Mapping) and isinstance(gap := topology.get("spectral_gap"), int | float):
            caption += f" Spectral gap {gap:.3g}."
        yield Network.from_matrix(f"network_{len(matrices)}", f"Graph of {member.label}", caption, matrix)
    if has(groups, CONSENSUS):
        axis = Axis("Σ‖θ_i − θ̄‖²/K")
        yield metric(groups, CONSENSUS, "Distance of the clients' models from their mean", axis)


# --- time

ROWS, ROUNDS_DRAWN = 40, 5
"""The most clients in a Gantt chart, and the rounds that it shows, measured in cohorts of clients' work."""


def gantts(groups: Sequence[RunGroup]) -> Iterator[Gantt]:
    """Which client works when, at the beginning of the first run of each group with devices."""
    members = [member for member in groups if {"begin", "end"} <= member.runs[0].mixing.keys()]
    for number, member in enumerate(members[:MATRICES], start=1):
        run = member.runs[0]
        last = run.mixing["round"][: int(ROUNDS_DRAWN * (run.cohort_size or 1))].max()
        work = select_rows(run.mixing, run.mixing["round"] <= last)
        names, row = np.unique(work["client"], return_inverse=True)
        indices = spaced_indices(len(names), ROWS)
        place = np.full(len(names), -1)
        place[indices] = np.arange(len(indices))
        work, row = select_rows(work, place[row] >= 0), place[row][place[row] >= 0]
        late = work["late"].astype(bool) if "late" in work else np.zeros(len(row), bool)
        last = int(work["round"].max())
        clock = run.curve("clock")
        caption = (
            "Bars are clients' work, from invitation to its end; vertical lines are server steps. Orange work is "
            f"thrown away. Seed {run.seed}, the first {last} steps"
            + (f", {len(indices)} of {len(names)} clients." if len(indices) < len(names) else ".")
        )
        steps = clock.y[clock.x <= last]
        labels = [str(names[i]) for i in indices]
        begin, end = (work[name].astype(np.float64) for name in ("begin", "end"))
        yield Gantt(f"gantt_{number}", f"Work of {member.label}", caption, labels, row, begin, end, late, steps)


def cumulative_objective(run: RunData) -> Curve:
    """Σ_{τ≤t} Σ_i p_i F_i(θ^τ) by round; a round without a value adds nothing."""
    values = run.curve(OBJECTIVE)
    return Curve(values.x, np.where(np.isfinite(values.y), values.y, 0.0).cumsum())


def cumulative_band(member: RunGroup) -> Band:
    """The cumulative objective of a group, over the rounds that all its seeds have reached."""
    sums = [total for run in member.runs if len(total := cumulative_objective(run))]
    common = np.array(sorted(set.intersection(*({*total.x.tolist()} for total in sums))))
    return band([Curve(common, total.at(common)) for total in sums])


def objectives(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """The objective in each round, and cumulative (Hahn 2024, figure 3.1: smaller is better)."""
    caption = (
        "The {} losses of the model that a round's clients received, weighted by the coefficients that then mixed "
        "their updates. Smaller is better. " + band_sentence(groups)
    )
    charts: tuple[tuple[str, str, str, str, Callable[[RunGroup], Band]], ...] = (
        (OBJECTIVE, "objective", "Global objective in each round", "training", partial(series, key=OBJECTIVE)),
        (OBJECTIVE, "objective_cumulated", "Global objective, cumulated", "training", cumulative_band),
        (VALIDATION_OBJECTIVE, "objective_validation", "Global objective on validation samples in each round",
         "validation", partial(series, key=VALIDATION_OBJECTIVE)),
    )  # fmt: skip
    for key, name, heading, kind, values in charts:
        lines = [line(member, values(member)) for member in groups if has([member], key)]
        if lines:
            yield Chart(name, heading, caption.format(kind), [ROUNDS], Axis("Σ p F"), lines)


def decisions(run: RunData) -> tuple[Floats, Floats] | None:
    """P and F(θ^t), float64 [T, K] each, if ``mixing.parquet`` has both for all clients in all rounds, else None.

    F are the losses that the policy saw: on validation samples, if it takes its responses there.
    """
    loss_column = next((column for column in ("validation_loss", "loss") if column in run.mixing), None)
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


def prior(run: RunData, p: Floats) -> Floats | None:
    """p^1 [K] for a run's decisions p [T, K]: p if it never changes, n_i/n if the policy starts there, else None."""
    if (p == p[0]).all():
        return p[0]
    if "prior='samples'" not in str(run.facts.get("method.mixing", "")) or not run.partition:
        return None
    sizes = total_by_client(run.partition, "samples").at(np.unique(run.mixing["client"]))
    return sizes / sizes.sum() if np.isfinite(sizes).all() else None


def regret_curve(run: RunData) -> Curve:
    """Σ_{τ≤t} ℓ_τ(p^τ) - ℓ_τ(p*) by round, with p* the best fixed p of the whole run; empty if losses are missing.

    All policies are evaluated with responses in [0, 1/K], as in AAggFF for silos.
    """
    record = decisions(run)
    if record is None:
        return NOTHING
    from fedloom.metrics.regret import played, regret_of_losses
    from fedloom.parts.mixing.responses import respond

    p, losses = record
    cdf, scale, shape = transformation(run)
    answer = partial(respond, cdf=cdf, scale=scale, shape=shape, low=0.0, high=1 / p.shape[1])
    values = regret_of_losses(played(p, prior(run, p)), losses, answer)
    return Curve(np.arange(1.0, len(values) + 1), values)


def groups_with_regret(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The groups, reduced to runs whose regret is known; groups without such runs are left out."""
    subgroups = [replace(g, runs=tuple(run for run in g.runs if decisions(run) is not None)) for g in groups]
    return [member for member in subgroups if member.runs]


def regrets(groups: Sequence[RunGroup]) -> Iterator[Chart]:
    """The regret of each group; the bound of Hahn 2024, theorem 3.1, which is far above it, is in the caption."""
    members = groups_with_regret(groups)
    lines = [line(g, band([regret_curve(run) for run in g.runs])) for g in members]
    if lines:
        from fedloom.metrics.regret import lipschitz, silo_bound

        bounds = dict.fromkeys((len(np.unique(run.mixing["client"])), run.last_round) for run in all_runs(members))
        bound_texts = [
            f"{silo_bound(t, k, lipschitz(0.0, 1 / k)):.3g} after {t} rounds with {k} clients" for k, t in bounds
        ]
        caption = (
            "What the mixing coefficients lost, in decision losses -log(1 + ⟨p, r⟩), against the best fixed ones of "
            "the whole run, where all clients' losses are known. The bound of theorem 3.1 is "
            f"{'; '.join(bound_texts)}. " + band_sentence(members)
        )
        yield Chart("regret", "Regret", caption, [ROUNDS], Axis("regret, cumulated"), lines)
