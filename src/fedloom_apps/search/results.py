"""The results of a search: finalists, their comparison on held-out seeds, each part's contribution, and a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.base import yaml
from fedloom.base.files import whole_file
from fedloom.experiment.atomic import write_whole
from fedloom.experiment.rundir import jsonable
from fedloom.experiment.trainer import Record
from fedloom.metrics.curves import paired
from fedloom_apps.search.space import Candidate, SearchSettings


def rank_candidates(records: Sequence[Record], maximise: bool) -> list[Record]:
    """Complete candidates, the best first, each once."""
    complete = [record for record in records if record["state"] == "complete" and record["score"] is not None]
    ranking: list[Record] = []
    for record in sorted(complete, key=lambda record: record["score"], reverse=maximise):
        if all(record["candidate"] != other["candidate"] for other in ranking):
            ranking.append(record)
    return ranking


def best_of_method(records: Sequence[Record], name: str, maximise: bool) -> Candidate | None:
    """The best complete candidate that is a named method without a replaced part."""
    matches = [record for record in rank_candidates(records, maximise) if record["label"] == name]
    return matches[0]["candidate"] if matches else None


def finalists(records: Sequence[Record], count: int, maximise: bool, reference: str) -> list[Candidate]:
    """The best candidates, of different composition; the reference is not among them."""
    candidates: dict[str, Candidate] = {}
    for record in rank_candidates(records, maximise):
        if record["label"] != reference:
            candidates.setdefault(record["label"], record["candidate"])
    return list(candidates.values())[:count]


def scores(history: Sequence[Record]) -> dict[str, dict[int, float]]:
    """The scores of the final comparison by role and seed; NaN where a run failed."""
    result: dict[str, dict[int, float]] = {}
    for record in history:
        if record["stage"] == "compare":
            score = record["score"]
            result.setdefault(record["role"], {})[record["seed"]] = math.nan if score is None else score
    return result


def winner(history: Sequence[Record], roles: Sequence[str], seeds: int, maximise: bool) -> str | None:
    """The role with the best mean on held-out seeds, the first of equal ones; None while runs are missing."""
    scores_by_role = scores(history)
    if not roles or any(len(scores_by_role.get(role, ())) < seeds for role in roles):
        return None
    worst = -math.inf if maximise else math.inf
    means = {role: float(np.mean(list(scores_by_role[role].values()))) for role in roles}
    return (max if maximise else min)(means, key=lambda role: worst if math.isnan(means[role]) else means[role])


def gain(
    values: Mapping[int, float], baseline: Mapping[int, float], maximise: bool, comparisons: int = 1
) -> dict[str, float]:
    """The gain of ``values`` over a baseline with the same seeds, as by ``paired``: positive is better, for any goal.

    >>> round(gain({1: 2.0, 2: 1.0}, {1: 2.5, 2: 2.5}, maximise=False)["mean"], 3)
    1.0
    """
    return paired(values, baseline, comparisons) if maximise else paired(baseline, values, comparisons)


PENDING = "The search stopped before its final comparison, so nothing is decided; continue it with resume=."


def summary(history: Sequence[Record], settings: SearchSettings, maximise: bool, reference: str) -> dict[str, Any]:
    """Ranking, contributions and verdict, as plain data."""
    means, records_by_role = scores(history), {r["role"]: r for r in history if r["stage"] == "compare"}
    ranking = []
    finalist_roles = [role for role in means if role.startswith("finalist")]
    for role in [*([reference] if reference in means else []), *finalist_roles]:  # the first of equal ones is ahead
        x = np.array(list(means[role].values()))
        advantage = None
        if role != reference:
            advantage = gain(means[role], means.get(reference, {}), maximise, len(finalist_roles))
        ranking.append(
            {
                "role": role,
                "label": records_by_role[role]["label"],
                "settings": settings_of(records_by_role[role]["candidate"]),
                "mean": float(x.mean()),
                "se": float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan,
                "seeds": len(x),
                "bytes": records_by_role[role]["bytes"],
                "gain": advantage,
            }
        )
    ranking.sort(key=lambda row: (math.isnan(row["mean"]), -row["mean"] if maximise else row["mean"]))
    best = ranking[0]["role"] if ranking else None
    parts = [
        {"without": role.removeprefix("without "), **gain(means[best], means[role], maximise)}
        for role in means
        if role.startswith("without ") and best is not None
    ]
    candidates = rank_candidates([record for record in history if record["stage"] == "search"], maximise)
    return {
        "goal": settings.goal,
        # on validation samples
        "chosen": "finalist 1" if finalist_roles and candidates[0]["label"] != reference else reference,
        "ranking": jsonable(ranking),
        "parts": jsonable(parts),
        "verdict": verdict(ranking, reference, bool(finalist_roles)) if ranking or not candidates else PENDING,
    }


def verdict(ranking: Sequence[Mapping[str, Any]], reference: str, finalists: bool = True) -> str:
    """The result in one sentence; ``finalists`` says whether anything was compared with the reference."""
    if not ranking:
        return "No candidate was run to its end; set a larger search.budget."
    if not finalists:
        advice = "set a larger search.budget, or search.rungs=0."
        return f"Nothing but {reference} was run to its end, so nothing is decided; {advice}"
    best = ranking[0]
    if best["role"] == reference:
        return f"No finalist is better than {reference} on the held-out seeds: take {reference}."
    advantage = best["gain"]
    if advantage is None or math.isnan(advantage["low"]):
        return f"{best['label']} is best, but without a comparison with {reference}."
    text = f"a gain of {advantage['mean']:+.4f}, 95 % interval {advantage['low']:+.4f} to {advantage['high']:+.4f}"
    text += f" over {advantage['seeds']} held-out seeds."
    if advantage["low"] > 0:
        return f"{best['label']} is better than {reference}: {text}"
    return f"{reference} may be as good as {best['label']}: {text}"


def settings_of(candidate: Candidate) -> str:
    """The settings of a candidate in a few words.

    >>> settings_of({"method": "feddyn", "method.alpha": 0.03, "method.mixing": "uniform", "local.lr": 0.1})
    'alpha=0.03 local.lr=0.1'
    """
    return " ".join(f"{key.removeprefix('method.')}={x:g}" for key, x in candidate.items() if isinstance(x, float))


def write(
    folder: Path,
    history: Sequence[Record],
    settings: SearchSettings,
    maximise: bool,
    reference: str,
    recipe: Callable[[Candidate], dict[str, Any]],
) -> None:
    """Write ``candidates.csv``, ``ranking.csv``, ``winner.yaml`` and ``figures/pareto.svg``."""
    import pandas as pd  # slow to import, like the other libraries of this file that are needed at the end

    candidates = [record for record in history if record["stage"] == "search"]
    columns = ("role", "label", "state", "score", "rounds", "bytes", "minutes", "reason")
    rows = [{**{key: r[key] for key in columns}, "settings": settings_of(r["candidate"])} for r in candidates]
    write_whole(folder / "candidates.csv", pd.DataFrame(rows).to_csv(index=False).encode())
    results = summary(history, settings, maximise, reference)
    gains = [row.pop("gain") or {} for row in results["ranking"]]
    table_rows = [
        {**row, **{f"gain {k}": v for k, v in advantage.items()}}
        for row, advantage in zip(results["ranking"], gains, strict=True)
    ]
    write_whole(folder / "ranking.csv", pd.DataFrame(table_rows).to_csv(index=False).encode())
    if table_rows:
        candidate = next(r["candidate"] for r in history if r["role"] == table_rows[0]["role"])
        write_whole(folder / "winner.yaml", yaml.dump(recipe(candidate)).encode())
    (folder / "figures").mkdir(exist_ok=True)
    with whole_file(folder / "figures" / "pareto.svg") as file:
        picture(candidates, settings.goal, maximise).savefig(file, format="svg")


def front(points: Sequence[tuple[float, float]], maximise: bool) -> list[int]:
    """The positions of Pareto-optimal points (cost, score), which no other point beats in both, in order of cost.

    >>> front([(1.0, 0.5), (2.0, 0.4), (3.0, 0.9)], maximise=True)
    [0, 2]
    """
    result, best = [], -math.inf
    gains = [score if maximise else -score for _, score in points]
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -gains[i])):
        if gains[i] > best:
            result, best = [*result, i], gains[i]
    return result


def picture(records: Sequence[Record], goal: str, maximise: bool) -> Any:
    """Plot score against bytes of all complete candidates; the Pareto-optimal ones are joined and named."""
    from matplotlib.figure import Figure

    candidates = rank_candidates(records, maximise)
    points = [(max(record["bytes"], 1) / 1e6, record["score"]) for record in candidates]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    if points:
        best = front(points, maximise)
        axes.scatter(*zip(*points, strict=True), s=18, color="0.6")
        axes.step(*zip(*(points[i] for i in best), strict=True), where="post", color="C0")
        for i in best:
            axes.annotate(candidates[i]["label"], points[i], textcoords="offset points", xytext=(4, 4), fontsize=8)
        axes.set_xscale("log")
    axes.set(xlabel="communicated, MB", ylabel=f"{goal} on validation samples")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
