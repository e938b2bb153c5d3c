"""The papers' claims, each with where its evidence lies in a file of results; ``protocol`` judges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from protocol import TARGET_SEEDS, AtLeast, Claim, Measure, find

DEFAULTS = "2026-11-22"
"""Results of an earlier day were made before these defaults changed."""
CHANGED = (
    "pFedMe follows its algorithm, with a learning rate of its own; momentum in SCAFFOLD and PFLScaf; FedDC adds the"
    " mean drift of all clients (superfed, pfl, ssa)",
    "the order of the server's stages: mixing before the correction of the drift (compositions of the two)",
    "SuPerFed: λ is chosen by 50 validation samples or more, λ 0 while the local model is untrained; table 2.3 by the"
    " scripts' settings, decay .999 instead of .99 (superfed)",
    "Heart with all 920 patients instead of 740, and with one logit (fair/responses)",
    "a short run of the grids has 30 rounds instead of 6 (pfl); FedExP mixes with the updates' coefficients (ssa)",
)
NOT_RUN = (
    "Acar: FedDyn on CIFAR-10 and CIFAR-100 (tables 2.1, 2.2); PFLDyn and PFLScaf at the thesis' scale and with 3 and 7"
    " classes (tables 3.1, 3.2, A.5, A.6), on CIFAR-100 and miniImageNet (A.7); FedHeN on CIFAR-10 and CIFAR-100 (4.1,"
    " 4.2); online streams of miniImageNet, of 3 and 4 classes, B-MOML on CIFAR-100 and with a whole buffer of 10"
    " (5.1 to 5.4, A.8 to A.10); distillation on CIFAR-100, TinyImageNet and ImageNet (6.3, 6.4, A.13, A.14); table 7.1"
    " on CIFAR-100",
    "Hahn: CIFAR-10 (2.3), CIFAR-100 and TinyImageNet (2.4), FEMNIST (2.5), pair noise .1 and symmetric noise .2 (2.6),"
    " CIFAR-10 (2.7); Berka, MQP and ISIC 2019 (3.6, 3.8), CelebA, Reddit and SpeechCommands (3.7, 3.9), TinyImageNet"
    " (3.10); CIFAR-10, DermaMNIST, OrganCMNIST and 100 clients (4.2 to 4.5)",
    "FedSSA: the columns of CIFAR-10 beside all methods; in rounds at full scale, NIID-2 there (tables 1 and 5)",
)
WITHOUT: Mapping[str, str] = {
    "distill/federated": "a question of our own: a teacher at the clients",
    "online/omniglot_5": "a question of our own: characters that no two tasks share",
    "search/compositions": "a question of our own: does a search pay?",
    "smoke/smoke": "no comparison",
    "ssa/heads": "methods of our own: a head, or a fitted mixture, for each target",
    "ssa/ranking": "says why table 1 does not hold",
    "synthesis/homogenise_digits": "a question of our own: what synthetic sets are good for",
    "synthesis/tuning_digits": "chooses settings, on a seed that is not reported",
    "synthesis/tuning_reduced": "chooses settings, on a seed that is not reported",
    "trust/compressed_digits": "a comparison of our own",
    "trust/compressed_fashion_mnist": "a comparison of our own",
    "trust/hostile_digits": "a comparison of our own",
    "trust/hostile_fashion_mnist": "a comparison of our own",
    "trust/inversion": "a comparison of our own",
    "trust/membership": "a comparison of our own",
    "trust/private_digits": "a comparison of our own",
    "trust/private_fashion_mnist": "a comparison of our own",
}
"""Files of results that no published claim is read from, with the reason."""


@dataclass(frozen=True)
class Result:
    """A file of results, what in it is not as published, and the claims that it bears on."""

    title: str
    differs: str
    claims: Sequence[Claim]


Row = tuple[str, str | float | Sequence[str], str]
"""A method; another, several others or a published figure; the published figures of both."""


def claims(table: str, says: str, path: str, *rows: Row, **about: Any) -> list[Claim]:
    """One claim a row; ``{}`` stands for the two methods in ``says``, and for one of them in ``path``."""
    found = []
    for ours, other, published in rows:
        if isinstance(other, float | int):
            against, paths = f"{other:g}", other
        elif isinstance(other, str):
            against, paths = other, path.format(other)
        else:
            against, paths = "all others", tuple(path.format(name) for name in other)
        found.append(Claim(table, says.format(ours, against), path.format(ours), paths, published, **about))
    return found


def reached(target: float) -> Measure:
    """Transmissions until the average model has an accuracy, in rounds of FedAvg."""

    def measure(run: Any, _: Mapping[str, Any]) -> float:
        hit = next((at for at, value in enumerate(run["average"], 1) if value is not None and value >= target), None)
        return AtLeast(run["rounds"] * run["cost"]) if hit is None else hit * run["cost"]

    return measure


def best_of(curve: str, rounds: str, *paths: str) -> Measure:
    """Rounds until a run has the best value that the runs at these paths all reach."""

    def measure(run: Any, results: Mapping[str, Any]) -> float:
        target = min(max(one[curve]) for path in paths for one in find(results, path).values())
        hit = next((at for at, value in zip(run[rounds], run[curve], strict=True) if value >= target), None)
        return AtLeast(run[rounds][-1]) if hit is None else hit

    return measure


ROUNDS: dict[str, Any] = {"lower": True, "digits": 0, "seeds": TARGET_SEEDS}
PERCENT: dict[str, Any] = {"unit": 100}
SENT: dict[str, Any] = {"cost": (lambda run, _: run["sent"] / 1e6, "M numbers")}
KEPT: dict[str, Any] = {"unit": 100, "cost": (lambda run, _: run["bytes"][-1] / 1e6, "MB kept")}
TRANSMITTED: dict[str, Any] = {"measure": lambda run, _: run["rounds"] * run["cost"], **ROUNDS}
CTM: dict[str, Any] = {"measure": lambda run, _: fmean(run["ctm"]), **KEPT}
LTM: dict[str, Any] = {"measure": lambda run, _: run["ltm"][-1][1], **KEPT}
BEST: dict[str, Any] = {"unit": 100, "digits": 2, "measure": lambda run, _: max(mean for mean, _ in run["accuracy"])}
IMAGES: dict[str, Any] = {"unit": 100, "measure": lambda run, _: run["clients/accuracy/mean"], **SENT}
FID: dict[str, Any] = {"lower": True, "measure": lambda run, _: run["fid"], **SENT}
CROSS_ENTROPY = best_of("accuracy", "rounds", "runs > FedAvg cross entropy")

ONE_TASK = "a step takes one of the buffer's tasks, not all"
ACID, ALID = (f"cells > {split} 5 > curves > {{}} > average mean > -1" for split in ("acid", "alid"))
HEN = ("NoSide", "Decouple")
GENERATORS = ("FedCGAN", "FedCVAE")
DEVICES = ("FedAvg", "q-FedAvg", "TERM", "FedMGDA+", "PropFair")
CDFS = ("weibull", "frechet", "gumbel", "exponential", "logistic", "normal")
TARGET = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "MOON", "FedDC", "FedDecorr", "FedAvgM", "FedExP", "AFL", "FedDF")
BRIEF = ("FedAvg", "FedPer", "APFL", "Ditto")
NOISY = ("FedProx", "SCAFFOLD", "LG-FedAvg", "FedRep", *BRIEF)
PERSONAL = ("pFedMe", *NOISY)

RESULTS: dict[str, Result] = {
    "feddyn/mnist_dirichlet": Result("FedDyn on MNIST, Dirichlet .3 (Acar)", "", [
        *claims("table 2.3", "{} needs fewer transmissions than {} to 98.2 %", "runs > {} > *",
                ("FedDyn", "SCAFFOLD", "90 : 208"), ("FedDyn", "FedAvg", "90 : 428"), ("FedDyn", "FedProx", "90 : 858"),
                measure=reached(0.982), **ROUNDS),
        *claims("table 2.3", "{} needs {} transmissions to 98.2 %, or fewer", "runs > {} > *",
                ("FedDyn", 90.0, "90"), ("FedAvg", 428.0, "428"), measure=reached(0.982), **ROUNDS),
        *claims("table 2.3", "{} needs fewer transmissions than {} to 97.2 %", "runs > {} > *",
                ("FedDyn", "SCAFFOLD", "37 : 68"), ("FedDyn", "FedAvg", "37 : 76"), ("FedDyn", "FedProx", "37 : 61"),
                measure=reached(0.972), **ROUNDS),
        *claims("table 2.3", "{} needs {} transmissions to 97.2 %, or fewer", "runs > {} > *",
                ("FedDyn", 37.0, "37"), ("FedAvg", 76.0, "76"), measure=reached(0.972), **ROUNDS),
    ]),
    "feddyn/table_a4": Result("FedDyn on the convex problem (Acar)", "", [
        claim
        for setting, scaffold, fedavg, differs in (
            ("homogeneous", "32 : 70", "32 : 136", "the published target lies below the mean L*; ours is type 3's"),
            ("type1", "17 : 88", "17 : 20", ""),
            ("type2", "150 : 164", "150 : 274", "γ is not published"),
            ("type3", "34 : 260", "34 : 79", ""))
        for claim in claims("table A.4", setting + ": {} needs fewer transmissions than {}",
                            f"settings > {setting} > draws > * > runs > {{}}", ("FedDyn", "SCAFFOLD", scaffold),
                            ("FedDyn", "FedAvg", fedavg), differs=differs, **TRANSMITTED)
    ]),
    "pfl/tables": Result("Personalised meta-learning (Acar)", "images of 16 by 16, a small CNN, 40 rounds of 1000", [
        *claims("tables 3.1, A.5", "ACID: {} is more accurate than {}", ACID,
                ("PFLDyn (Proto)", "P-Avg (Proto)", "221 : 783 to 88.8 %"),
                ("PFLDyn (Proto)", "Per-FedAvg", "221 : >1000 to 88.8 %"),
                ("PFLScaf (Proto)", "P-Avg (Proto)", "666 : 783 to 88.8 %"), **PERCENT),
        *claims("tables 3.2, A.6", "ALID: {} is more accurate than {}", ALID,
                ("PFLDyn (Proto)", "P-Avg (Proto)", "161 : 341 to 87.5 %"),
                ("PFLDyn (Proto)", "Per-FedAvg", "161 : >1000 to 87.5 %"), **PERCENT),
        *claims("figure A.16", "ALID: {} is more accurate than {}", ALID,
                ("PFLDyn (Proto)", "FedDyn + Proto", "-"), **PERCENT),
    ]),
    "pfl/letters": Result("Personalised meta-learning on letters (Acar)",
                          "letters of 14 by 14 for CIFAR-10, a small CNN, 200 rounds of 1000", [
        claim for split, table, rows in (
            ("acid", "tables 3.1, A.5", (("PFLDyn (Proto)", "P-Avg (Proto)", "221 : 783 to 88.8 %"),
                                         ("PFLScaf (Proto)", "P-Avg (Proto)", "666 : 783 to 88.8 %"),
                                         ("PFLDyn (Proto)", "FedDyn + Proto", "-"))),
            ("alid", "tables 3.2, A.6", (("PFLDyn (Proto)", "P-Avg (Proto)", "161 : 341 to 87.5 %"),
                                         ("PFLScaf (Proto)", "P-Avg (Proto)", "452 : 341 to 87.5 %"))))
        for claim in claims(table, split.upper() + ": {} is more accurate than {}",
                            f"splits > {split} > runs > {{}} > * > average mean > -1", *rows, **PERCENT, digits=2)
    ]),
    "fedhen/tables": Result("Networks of two sizes (Acar)", "Fashion-MNIST, a small CNN, 150 rounds of 1000", [
        claim
        for split, size, published in (
            ("iid", "simple", "289 : 805 to 84.4 %"), ("iid", "complex", "649 : 941 to 88.5 %"),
            ("dirichlet", "simple", "295 : 810 to 79.4 %"), ("dirichlet", "complex", "596 : 857 to 84.2 %"))
        for claim in claims("tables 4.1, 4.2", f"{split}, {size} model: {{}} needs fewer rounds than {{}}",
                            f"runs > {split} > {{}} > *", ("FedHeN", HEN, published), **ROUNDS, **SENT,
                            measure=best_of(f"{size}, all clients", "at",
                                            *(f"runs > {split} > {name} > *" for name in ("FedHeN", *HEN))))
    ]),
    "online/s_mnist": Result("Online meta-learning on S-MNIST (Acar)", "", [
        *(claim for steps in ("K 10", "K 20")
          for level, measure, rows in (
              ("new task", CTM, (("MOML", "FTML", "85.82 : 80.62"), ("FTML", "MOGD", "80.62 : 74.63"))),
              ("all tasks", LTM, (("MOML", "FTML", "87.49 : 82.49"), ("FTML", "MOGD", "82.49 : 74.07"))))
          for claim in claims("table 5.1", f"S-MNIST, {steps}, {level}: {{}} is more accurate than {{}}",
                              f"runs > {steps} > {{}} > *", *rows, **measure)),
        *claims("table 5.1", "S-MNIST, new task: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("MOGD", "FS", "74.63 : 71.15"), ("FTML", "TOE", "80.62 : 71.22"), **CTM),
        *claims("table 5.1", "S-MNIST, all tasks: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("MOGD", "FS", "74.07 : 71.14"), ("FTML", "TOE", "82.49 : 63.73"), **LTM),
        *claims("table A.10", "S-MNIST, new task: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("MOML", "MOML ∇=0", "85.82 : 84.09"), **CTM),
        *claims("table A.10", "S-MNIST, all tasks: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("MOML", "MOML ∇=0", "87.49 : 86.53"), **LTM),
        *claims("table 5.3", "S-MNIST, all tasks: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("B-MOML 5, whole", "MOML", "87.54 : 87.49"), **LTM),
        *claims("table 5.4", "S-MNIST, new task: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("B-MOML 5, whole", "B-MOML 5 random, whole", "84.21 : 83.30"), **CTM),
        *claims("table 5.4", "S-MNIST, all tasks: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("B-MOML 5, whole", "B-MOML 5 random, whole", "87.54 : 86.09"), **LTM),
        *claims("table 5.3", "S-MNIST, all tasks: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("B-MOML 10", "MOML", "87.77 : 87.49"), differs=ONE_TASK, **LTM),
        *claims("table 5.4", "S-MNIST, new task: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("B-MOML 10", "B-MOML 10 random", "84.33 : 84.07"), differs=ONE_TASK, **CTM),
        *claims("table 5.4", "S-MNIST, all tasks: {} is more accurate than {}", "runs > K 10 > {} > *",
                ("B-MOML 10", "B-MOML 10 random", "87.77 : 86.97"), differs=ONE_TASK, **LTM),
    ]),
    "online/cifar100_5": Result("Online meta-learning on 5-way CIFAR-100 (Acar)",
                                "20 steps a task instead of 100 or 200, 100 tasks of 200", [
        claim
        for level, measure, rows in (
            ("new task", CTM, (("MOML", "FTML", "55.83 : 50.68"), ("FTML", "MOGD", "50.68 : 49.92"),
                               ("FTML", "FS", "50.68 : 31.58"))),
            ("all tasks", LTM, (("MOML", "FTML", "60.78 : 54.50"), ("FTML", "MOGD", "54.50 : 50.21"),
                                ("FTML", "FS", "54.50 : 31.60"))))
        for claim in claims("table 5.1", f"5-way CIFAR-100, {level}: {{}} is more accurate than {{}}",
                            "runs > K 20 > {} > *", *rows, **measure)
    ]),
    "online/tables": Result("Online meta-learning on 5-way tasks (Acar)", "letters for CIFAR-100", [
        *claims("table 5.1", "5-way, new task: {} is more accurate than {}", "settings > letters_5 > {}",
                ("MOML", "FTML", "55.83 : 50.68"), **CTM),
    ]),
    "distill/toys": Result("Selective distillation, toy problems (Acar)",
                           "starts, sample sizes and margins, which the thesis does not give", [
        *claims("table 6.1", "1-D: more starts end in minimum C with {} than with {}",
                "toys > intervals > methods > {} > * > counts > C", ("DiSK", "KD", "90 : 3"), digits=0),
        *claims("table 6.1", "2-D: more starts end in minimum D with {} than with {}",
                "toys > six gaussians > methods > {} > * > counts > D", ("DiSK", "KD", "97 : 57"), digits=0),
    ]),
    "distill/students": Result("Selective distillation (Acar)", "Fashion-MNIST, small networks", [
        *claims("tables 6.3, 6.4", "equal passes: {} is more accurate than {}", "runs > equal passes/{} > * > accuracy",
                ("DiSK", "CE", "-"), ("DiSK", "KD", "-"), ("SimKD + DiSK", "SimKD", "-"), **PERCENT),
        *claims("tables 6.3, 6.4", "rounds as published: {} is more accurate than {}",
                "runs > as published/{} > * > best_on_test",
                ("DiSK", "CE", "-"), ("DiSK", "KD", "-"), ("SimKD + DiSK", "SimKD", "-"), **PERCENT),
    ]),
    "sides/table_7_1": Result("Stronger local losses (Acar)", "CIFAR-10, a small CNN, 40 rounds", [
        *claims("table 7.1", "{} needs fewer rounds than {}", "runs > {}",
                ("FedAvg distillation", "FedAvg cross entropy", "403 : 1634"),
                ("FedAvg robustness", "FedAvg cross entropy", "808 : 1634"),
                ("FedDyn cross entropy", "FedAvg cross entropy", "419 : 1634"),
                ("FedDyn both", "FedDyn cross entropy", "250 : 419"), measure=CROSS_ENTROPY, **ROUNDS),
    ]),
    "superfed/table_2_3": Result("SuperFed on MNIST, two classes a client (Hahn)", "", [
        *claims("table 2.3", "500 clients: {}, λ by validation, is ahead of {}",
                "runs > 500 > {} > * > validation > mean > -1", ("SuPerFed-MM", PERSONAL, "99.24 : 98.98"), **PERCENT),
        Claim("table 2.3", "500 clients: SuPerFed-MM, λ by test images as published, is ahead of all others",
              "runs > 500 > SuPerFed-MM > * > as published > mean > -1",
              tuple(f"runs > 500 > {name} > * > validation > mean > -1" for name in PERSONAL), "99.24 : 98.98",
              **PERCENT),
        *claims("table 2.3", "100 clients: {} is ahead of {}", "runs > 100 > {} > * > validation > mean > -1",
                ("SuPerFed-MM", PERSONAL, "99.38 : 99.19"), differs="24 rounds of 500", **PERCENT),
        *claims("table 2.3", "50 clients: {} is ahead of {}", "runs > 50 > {} > * > validation > mean > -1",
                ("SuPerFed-LM", PERSONAL, "99.48 : 99.40"), differs="12 rounds of 500", **PERCENT),
    ]),
    "superfed/table_2_3_scripts": Result("SuperFed on MNIST, the scripts' settings (Hahn)", "", [
        *claims("table 2.3", "500 clients: {} is ahead of {}", "runs > 500 > {} > * > validation > mean > -1",
                ("SuPerFed-MM", PERSONAL, "99.24 : 98.98"), ("SuPerFed-MM", "APFL", "99.24 : 98.98"),
                ("SuPerFed-MM", "FedAvg", "99.24 : 96.04"), ("SuPerFed-LM", "FedAvg", "98.83 : 96.04"),
                ("APFL", "FedAvg", "98.98 : 96.04"), ("APFL", "FedPer", "98.98 : 98.67"), scripts=True, **PERCENT),
        Claim("table 2.3", "500 clients: SuPerFed-MM, λ by test images as published, is ahead of all others",
              "runs > 500 > SuPerFed-MM > * > as published > mean > -1",
              tuple(f"runs > 500 > {name} > * > validation > mean > -1" for name in PERSONAL), "99.24 : 98.98",
              scripts=True, **PERCENT),
    ]),
    "superfed/longer/table_2_3": Result("SuperFed's rivals on MNIST (Hahn)", "150 rounds of 500", [
        *claims("table 2.3", "100 clients: {} is more accurate than {}", "runs > 100 > {} > * > validation > mean > -1",
                ("APFL", "FedAvg", "99.19 : 89.78"), ("APFL", "FedPer", "99.19 : 99.14"), **PERCENT),
    ]),
    "superfed/tables_2_4_2_5_reduced": Result("SuperFed on Shakespeare (Hahn)", "40 of 660 roles, 30 rounds of 500", [
        claim for top, published in (("accuracy", "54.52 : 54.08"), ("top5", "84.27 : 83.32"))
        for claim in claims("table 2.5", top + ": {} is ahead of {}",
                            f"columns > shakespeare > runs > {{}} > {top} > validation > mean > -1",
                            ("SuPerFed-MM", BRIEF, published), **PERCENT)
    ]),
    "superfed/table_2_6": Result("SuperFed under wrong labels (Hahn)", "60 rounds of 500 (pair), 12 (symmetric)", [
        *claims("table 2.6", "pair .4: {} is more accurate than {}", "runs > pair .4 > {} > accuracy > mean",
                ("SuPerFed-LM", NOISY, "46.82 : 44.92"), **PERCENT),
        *claims("table 2.6", "pair .4: {} has a lower ECE than {}", "runs > pair .4 > {} > ece > mean",
                ("SuPerFed-MM", NOISY, ".28 : .38"), lower=True, digits=3),
        *claims("table 2.6", "symmetric .6: {} is more accurate than {}", "runs > symmetric .6 > {} > accuracy > mean",
                ("SuPerFed-MM", BRIEF, "56.07 : 52.41"), **PERCENT),
        *claims("table 2.6", "symmetric .6: {} has a lower ECE than {}", "runs > symmetric .6 > {} > ece > mean",
                ("SuPerFed-MM", BRIEF, ".30 : .40"), lower=True, digits=3),
    ]),
    "superfed/table_2_7_reduced": Result("SuperFed's settings (Hahn)", "MNIST, 100 rounds of 200", [
        *claims("table 2.7", "MM: L/T = {} is more accurate than {}", "starts > SuPerFed-MM > {} > late",
                ("0.4", "0", "92.69 : 89.87"), **BEST),
        *claims("table 2.7", "LM: L/T = {} is more accurate than {}", "starts > SuPerFed-LM > {} > late",
                ("0.4", "0", "92.69 : 91.55"), **BEST),
        *claims("figure 2.3", "MM: ν = {} is more accurate than {}", "grid > SuPerFed-MM > {} 0.01 > own",
                ("2", "0", "-"), **BEST),
    ]),
    **{file: Result(f"Accuracy against λ{words} (Hahn)", "", [
        Claim("figure 2.5", f"{name}: λ = .5 is more accurate than both ends", f"runs > {name} > * > mean > 5",
              (f"runs > {name} > * > mean > 0", f"runs > {name} > * > mean > 10"), scripts=bool(words), **PERCENT)
        for name in ("SuPerFed-MM", "SuPerFed-LM")])
       for file, words in (("superfed/figure_2_5", ""), ("superfed/figure_2_5_scripts", ", the scripts' settings"))},
    "superfed/landscape": Result("The loss around the server's model (Hahn)", "24 rounds", [
        *claims("figure 2.4", "The loss has risen by .1 at a larger distance with {} than with {}", "runs > {}",
                ("SuPerFed-MM", "FedAvg", "-"), measure=lambda run, _: min(run["reach"]), digits=2),
    ]),
    "fair/silo": Result("Fair methods between silos: Heart (Hahn)", "", [
        *claims("table 3.10", "Heart: {} has a higher worst AUROC than {}",
                "data > heart_published > runs > {} > * > worst10", ("AAggFF", "FedAvg", "66.56 : 65.22"), **PERCENT),
        *claims("table 3.10", "Heart: {} has a higher AUROC, weighted by samples, than {}",
                "data > heart_published > runs > {} > * > weighted", ("AAggFF", "FedAvg", "85.04 : 84.42"), **PERCENT),
    ]),
    "fair/device": Result("Fair methods between devices (Hahn)", "MNIST by writer and Fashion-MNIST", [
        claim for data in ("mnist_writers", "fashion_dirichlet")
        for claim in claims("tables 3.7, 3.9", data + ": {} has a higher worst 10 % than {}",
                            f"data > {data} > runs > {{}} > * > worst10",
                            ("AAggFF", "FedAvg", "56.71 : 55.76 (CelebA)"),
                            ("AAggFF", DEVICES, "14.54 : 11.19 (SpeechCommands)"), **PERCENT)
    ]),
    "fair/plug_and_play": Result("AAggFF in other algorithms (Hahn)", "", [
        claim for data, differs, rows in (
            ("heart_published", "",
             (("FedAvg", "66.56 : 65.22"), ("FedProx", "66.67 : 65.44"), ("FedAdam", "67.00 : 65.44"),
              ("FedYogi", "67.00 : 65.67"), ("FedAdagrad", "66.67 : 65.67"))),
            ("fashion_dirichlet", "Fashion-MNIST for TinyImageNet", (("FedAvg", "-"), ("FedAdam", "-"))))
        for name, published in rows
        for claim in claims("table 3.10", f"{data}: {name} {{}} AAggFF has a higher worst 10 % than {{}}",
                            f"data > {data} > runs > {name} > {{}} > * > worst10", ("with", "alone", published),
                            differs=differs, **PERCENT)
    ]),
    "fair/responses": Result("Response transformations (Hahn)", "Heart and MNIST by writer for Berka and Reddit", [
        claim for data, cdf in (("heart", "normal"), ("mnist_writers", "weibull"))
        for claim in claims("figure 3.1", data + ": the {} CDF cumulates less than {}",
                            f"data > {data} > runs > {{}} > *",
                            (cdf, tuple(other for other in CDFS if other != cdf), "-"), lower=True, digits=2,
                            measure=lambda run, _: run["objective"])
    ]),
    "ssa/table_1": Result("Models for a target: FedSSA", "10 rounds of 100", [
        *claims("table 1", "NIID-1, skew: {} is more accurate than {}", "runs > niid_1 > {} > * > skew > accuracy",
                ("FedSSA", "FedAvg", "99.50 : 95.60"), **PERCENT),
    ]),
    "ssa/table_1_small": Result("Models for a target: FedSSA, small", "3000 of 60 000 images, 16 rounds of 100", [
        *claims("table 1", "NIID-1, skew: {} is more accurate than {}", "runs > niid_1 > {} > * > skew > accuracy",
                ("FedSSA", "FedAvg", "99.50 : 95.60"), **PERCENT),
        *(claim for split, target, published in (
            ("niid_1", "imbalanced 100", "86.97 : 86.68"), ("niid_1", "imbalanced 50", "84.69 : 84.36"),
            ("niid_2", "skew", "96.40 : 93.36"), ("niid_2", "imbalanced 100", "90.92 : 90.27"))
          for claim in claims("table 1", f"{split}, {target}: {{}} is ahead of {{}}",
                              f"runs > {split} > {{}} > 1 > {target} > accuracy", ("FedSSA", TARGET, published),
                              **PERCENT)),
    ]),
    "ssa/heads_published": Result("FedSSA learnt once at the paper's scale", "learnt once, after training", [
        claim for target, published in (("client 1", "99.50 : 95.60"), ("imbalanced 100", "86.97 : 84.34"),
                                        ("imbalanced 50", "84.69 : 82.61"))
        for claim in claims("table 1", f"NIID-1 in order, {target}: {{}} is more accurate than {{}}",
                            f"runs > in order > * > {target} > {{}}",
                            *((way, "FedAvg", published) for way in ("FedSSA, Adam", "FedSSA, SGD")), **PERCENT)
    ]),
    "ssa/heads_cifar10": Result("FedSSA learnt once on CIFAR-10", "10 000 images, 20 rounds of 100", [
        claim for target, gain in (("client 1", "+30.45"), ("imbalanced 100", "+16.23"), ("uniform", "+0.02"))
        for claim in claims("table 3", f"CIFAR-10, NIID-1 in order, {target}: {{}} is more accurate than {{}}",
                            f"runs > in order > * > {target} > {{}}",
                            *((way, "FedAvg", gain) for way in ("FedSSA, Adam", "FedSSA, SGD")), **PERCENT)
    ]),
    "ssa/table_6": Result("FedSSA: the number of clients", "Fashion-MNIST for CIFAR-10, 16 rounds of 100", [
        claim for clients, published in ((5, "81.78 : 65.10"), (10, "79.79 : 65.15"), (20, "81.46 : 77.94"))
        for claim in claims("table 6", f"{clients} clients: {{}} is more accurate than {{}}",
                            f"runs > {{}} > {clients} > accuracy", ("FedSSA", "FedAvg", published), **PERCENT)
    ]),
    "ssa/weights": Result("FedSSA: weights for finished runs", "Fashion-MNIST for CIFAR-10, 3000 images", [
        *(claim for target, gain in (("skew", "+30.45"), ("imbalanced 100", "+16.23"), ("uniform", "+0.02"))
          for claim in claims("table 3", target + ": FedSSA, learnt once ({}), is more accurate than {}",
                              f"found > niid_1 > seeds > * > {target} > {{}}", ("SGD, λ_var 10", "FedAvg", gain),
                              **PERCENT)),
        *claims("table 9", "skew: FedSSA ({}) is more accurate than {}", "found > niid_1 > seeds > * > skew > {}",
                ("SGD, λ_var 10", "similarity", "-"), ("SGD, λ_var 10", "confidence", "-"), **PERCENT),
        *claims("table 2", "skew: {} is more accurate than {}", "found > niid_1 > votes > skew > {}",
                ("sample-wise FedSSA", "FedAvg + ensemble", "72.50 : 69.70"), **PERCENT),
        Claim("table 4", "skew: the first client's model is more accurate than the others'",
              "found > niid_1 > single > skew > 0",
              tuple(f"found > niid_1 > single > skew > {other}" for other in range(1, 5)), **PERCENT),
    ]),
    **{file: Result(f"Synthetic sets: {data} (Hahn)", differs, [
        *(claim for alpha, accuracy, fid in columns for claim in (
            *claims("tables 4.2, 4.3", f"α {alpha}: {{}} makes a better classifier than {{}}",
                    f"cells > {data} 10 {alpha} > runs > {{}} > * > equal", ("FedEvg", GENERATORS, accuracy), **IMAGES),
            *claims("tables 4.4, 4.5", f"α {alpha}: {{}} has a lower FID than {{}}",
                    f"cells > {data} 10 {alpha} > runs > {{}} > * > equal", ("FedEvg", GENERATORS, fid), **FID)))])
       for file, data, differs, columns in (
           ("synthesis/table_4_2_digits", "digits", "digits, small networks", (("1", "-", "-"), ("0.01", "-", "-"))),
           ("synthesis/table_4_2_reduced", "mnist", "small networks, 60 rounds of 500",
            (("1", "70.94 : 64.73", "124.72 : 181.3"), ("0.01", "62.95 : 66.93", "171.53 : 214.35"))))},
}  # fmt: skip
