"""Synthetic data from a federation: FedEvg beside FedCGAN and FedCVAE (Hahn, thesis, tables 4.2 to 4.5, figures 4.1 to
4.4).

    FEDLOOM_DATA=... python recipes/synthesis/table_4_2.py [--scale reduced] [--seeds 1] [--alphas 0.01 1] [--only ...]
    python recipes/synthesis/table_4_2.py --table             # rebuild tables and figures from the stored results

K clients. With ``--split classes``, the default, each class is split among the clients by Dirichlet(alpha), as most
frameworks do, so that sizes are skewed, too; with ``--split clients`` all have the same size and draw their own
label shares from Dirichlet(alpha), which is what the thesis describes (results in ``table_4_2_..._clients``).

Every method runs for T rounds with the same local steps and yields ten images of each class. A new classifier is
trained on them until it converges, with shifts as augmentation, and is tested on all test images of every client (the
mean over clients is what the thesis' tables 4.2 and 4.3 show) and on the common test set. FID is that of the images and
all test images, on features of a classifier trained on real data (the thesis took Inception's: give its weights with
--inception).

**Equal communication.** A round of FedEvg sends M images and labels down, M gradients and weights up; one of FedCGAN
and FedCVAE a whole pair of networks each way. They are judged at equal rounds, and also after as many rounds as send no
more than FedEvg has sent in all.

``reduced`` is for a laptop: MNIST at 28², K 10, small networks, few rounds; in so few the server of FedEvg takes steps
three times the published ones, and its network must see the whole image. ``full`` has the thesis' settings
(ResNet-10, 500 rounds, K 10 and 100, four data sets) and is for a machine with a GPU. "FedEvg, apart" is FedEvg with
repulsion between the images of a class at the server, which costs no communication and is no part of the thesis.
``--only "FedCGAN, ACGAN" "FedCVAE, β = D" "FedEvg, kept, apart"`` adds rows: FedCGAN by AC-GAN and FedCVAE with a mean
over pixels in its loss, as published, and FedEvg with kept models, raw weights and repulsion together.
Interrupted work continues where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import reporting
import torch
import torch.nn.functional as F
from settings import METHODS, SCALES, VARIANTS, Scale, Setup
from torch import nn

from fedloom.base.errors import DataError
from fedloom.base.rng import stream
from fedloom.core.federation import Arrays, Federation
from fedloom.data import Source, federate, partitions, sources
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.models import models
from fedloom_apps.synthesis.judge import SyntheticEvaluator
from fedloom_apps.synthesis.run import synthesize

SPLITS = {"classes": "dirichlet", "clients": "dirichlet_balanced"}  # what has shares from a Dirichlet distribution


def source(name: str, side: int) -> Source:
    """A data set with pixels from 0 to 1, for which FedEvg's step sizes are meant, at the given size."""
    settings = {"size": 64} if name in ("dermamnist", "organcmnist") and side == 64 else {}
    if "normalise" in sources[name].parameters:
        settings["normalise"] = False
    data = sources.make(name, **settings)
    return replace(data, train=sized(data.train, side), test=sized(data.test, side))


def sized(arrays: Arrays, side: int) -> Arrays:
    """The images, resized if necessary."""
    if arrays.x.shape[-1] == side:
        return arrays
    x = F.interpolate(arrays.x, size=(side, side), mode="bilinear", align_corners=False, antialias=True)
    return replace(arrays, x=x.clamp(0, 1))


def federation(data: Source, clients: int, alpha: float, seed: int, split: str = "classes") -> Federation:
    """Labels split by Dirichlet; a fifth of each client's images is its hold-out."""
    return federate(data, partitions.make(SPLITS[split], alpha=alpha), clients, seed)


def experiment(name: str, scale: Scale, parts: Federation, seed: int) -> Experiment:
    """One cell of the tables."""
    setup, arrays = scale.setups[name], parts.train.arrays
    rounds = equal_rounds(name, scale, arrays) if scale.stops else scale.rounds
    return Experiment(
        replace(setup.make_method(scale.spc, arrays.x[0].numel()), name=folder(name)),
        parts,
        lambda: network(setup, arrays),
        rounds=rounds,
        participation=min(1.0, 10 / len(parts)),
        local=setup.local,
        evaluation=Evaluation(what=()),
        seed=seed,
        device=scale.device,
    )


def network(setup: Setup, arrays: Arrays) -> nn.Module:
    """The network of a method for such images."""
    return models.make(setup.network, classes=arrays.classes, inputs=tuple(arrays.x.shape[1:]), **setup.layers)


def folder(name: str) -> str:
    """The name of a row's folder.

    >>> folder("FedEvg, apart")
    'fedevg-apart'
    """
    return name.lower().replace(", ", "-").replace(" = ", "-").replace("β", "beta")


def numbers_sent(name: str, scale: Scale, arrays: Arrays) -> int:
    """Numbers that a client sends and receives in a round."""
    setup = scale.setups[name]
    if setup.method.startswith("fedevg"):
        return 2 * arrays.classes * scale.spc * (arrays.x[0].numel() + 1)
    with torch.device("meta"):
        return 2 * sum(p.numel() for p in network(setup, arrays).parameters())


def equal_rounds(name: str, scale: Scale, arrays: Arrays) -> int:
    """The rounds in which a method sends no more than FedEvg in all of its rounds; at most all."""
    budget = scale.rounds * numbers_sent("FedEvg", scale, arrays)
    return max(min(budget // numbers_sent(name, scale, arrays), scale.rounds), 1)


def evaluation_in_round(record: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of the set in a round."""
    numbers = {
        key.removeprefix("synthetic/"): reporting.rounded(v)
        for key, v in record.items()
        if key.startswith("synthetic/")
    }
    return {"round": record["round"], "sent": record["comm/params"], **numbers}


def work(name: str, scale: Scale, parts: Federation, seed: int, place: Path, cache: Path) -> dict[str, Any]:
    """Run or resume one cell; its results."""
    many = equal_rounds(name, scale, parts.train.arrays)
    judging = replace(scale.judging, every=many, per_class=scale.spc)
    resume = (place / "config.yaml").is_file()
    synthesis = synthesize(experiment(name, scale, parts, seed), place, judging, cache=cache, resume=resume)
    looks = {
        record["round"]: evaluation_in_round(record) for record in synthesis.result.history if "synthetic/fid" in record
    }
    last = {"round": synthesis.result.history[-1]["round"], "sent": synthesis.result.history[-1]["comm/params"]}
    last |= {
        key.removeprefix("synthetic/"): reporting.rounded(value) for key, value in synthesis.evaluation.numbers.items()
    }
    return {
        "final": last,
        "equal": looks.get(many, last),
        "steps": scale.setups[name].local.steps or "an epoch",
        "parameters": numbers_sent(name, scale, parts.train.arrays),
        "seconds": round(sum(record["seconds"] for record in synthesis.result.history), 1),
        "failures": len(synthesis.result.failures),
        "left_out": reporting.excluded_share(synthesis.result.history),
        "features": synthesis.evaluation.details["features"],
        "features_accuracy": reporting.rounded(synthesis.evaluation.details["features_accuracy"]),
        "classifier": synthesis.evaluation.details["classifier"],
    }


def reference(judge: SyntheticEvaluator, spc: int) -> dict[str, Any]:
    """The evaluation of as many real training images."""
    arrays, draws = judge.training_samples, stream(0, "reference")
    y = arrays.y.cpu().numpy()
    rows = [draws.permutation((y == label).nonzero()[0])[:spc] for label in range(arrays.classes)]
    scores = judge.evaluate(arrays.take(torch.cat([torch.from_numpy(part) for part in rows])))
    return {key.removeprefix("synthetic/"): reporting.rounded(value) for key, value in scores.numbers.items()}


def do(arguments: argparse.Namespace, say: Callable[[str], None] = print) -> None:
    """Run whatever was requested and is missing, writing the results after each run."""
    path, home = arguments.out / f"table_4_2_{arguments.stem}.json", arguments.runs / arguments.stem
    if arguments.table:
        common.report(path, METHODS + VARIANTS)
    else:
        _run(arguments, home, path, say)
    common.draw(path, arguments.runs, METHODS + VARIANTS)


def _run(arguments: argparse.Namespace, home: Path, path: Path, say: Callable[[str], None]) -> None:
    scale = SCALES[arguments.scale]
    if arguments.rounds:
        scale = replace(scale, rounds=arguments.rounds)
    if arguments.inception:
        scale = replace(scale, judging=replace(scale.judging, inception=arguments.inception))
    for seed in arguments.seeds:
        for name, side in scale.sides.items():
            try:
                data = source(name, side)
            except DataError as error:
                say(f"{name} is skipped: {error}")
                continue
            for clients in scale.clients:
                for alpha in arguments.alphas:
                    parts = federation(data, clients, alpha, seed, arguments.split)
                    key = f"{name} {clients} {alpha:g}"
                    _cell(arguments, scale.at(alpha), key, seed, parts, home / key.replace(" ", "-"), path, say)


def _cell(
    arguments: argparse.Namespace,
    scale: Scale,
    key: str,
    seed: int,
    parts: Federation,
    home: Path,
    path: Path,
    say: Callable[[str], None],
) -> None:
    cache = home.parent / "judge"
    common.keep_real(parts.test, home)
    for name in (name for name in arguments.only if name in scale.setups):
        results = reporting.read(path) or {"scale": arguments.stem, "notes": [], "cells": {}}
        cell = results["cells"].setdefault(key, {"real": {}, "runs": {}})
        if str(seed) in cell["runs"].get(name, {}):
            continue
        place = home / f"{folder(name)}-{seed}"
        run_results = work(name, scale, parts, seed, place, cache)
        if str(seed) not in cell["real"]:
            judge = SyntheticEvaluator(parts, replace(scale.judging, per_class=scale.spc), seed, cache)
            cell["real"][str(seed)] = reference(judge, scale.spc)
        cell["runs"].setdefault(name, {})[str(seed)] = run_results
        facts = {"rounds": scale.rounds, "spc": scale.spc, "stops": scale.stops}
        results |= {"command": arguments.command, "machine": reporting.machine(), **facts}
        reporting.write(path, results)
        final = run_results["final"]
        say(
            f"{key}, seed {seed}, {name}: clients {100 * final['clients/accuracy/mean']:.1f} %, "
            f"FID {final['fid']:.1f}, recognised {100 * final['recognised']:.0f} %, "
            f"diversity {final['diversity']:.2f} ({run_results['seconds']:.0f} s)"
        )
        common.report(path, METHODS + VARIANTS)


def options(parser: argparse.ArgumentParser) -> None:
    """The command-line options."""
    parser.add_argument("--scale", choices=SCALES, default="reduced")
    parser.add_argument("--split", choices=SPLITS, default="classes", help="what Dirichlet shares are drawn for")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0, 0.01])
    parser.add_argument("--only", nargs="+", choices=METHODS + VARIANTS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--inception", type=Path, default=None)


def main(words: Sequence[str] | None = None) -> int:
    """Run, or write tables and pictures from the stored results."""
    return common.main("table_4_2", __doc__ or "", options, do, words)


if __name__ == "__main__":
    sys.exit(main())
