"""Claims of the FedSSA paper."""

from __future__ import annotations

from protocol import Claim

from .measures import PERCENT, Result, claims

TARGET = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "MOON", "FedDC", "FedDecorr", "FedAvgM", "FedExP", "AFL", "FedDF")

TABLE_3 = (
    "Table 3 prints gains of 30.45 and 16.23; its accuracies less those of FedAvg in table 1 give 40.45 and 12.63, "
    "which are used here."
)

RESULTS: dict[str, Result] = {
    "ssa/table_1": Result("Models for a target: FedSSA", "10 of 100 rounds", [
        *claims("table 1", "NIID-1, skew: {} is more accurate than {}", "runs > niid_1 > {} > * > skew > accuracy",
                ("FedSSA", "FedAvg", "99.50 : 95.60"), **PERCENT),
    ]),
    "ssa/table_1_small": Result("Models for a target: FedSSA, small", "3000 of 60 000 images, 16 of 100 rounds", [
        *claims("table 1", "NIID-1, skew: {} is more accurate than {}", "runs > niid_1 > {} > * > skew > accuracy",
                ("FedSSA", "FedAvg", "99.50 : 95.60"), **PERCENT),
        *(claim for split, target, published in (
            ("niid_1", "imbalanced 100", "86.97 : 86.68"), ("niid_1", "imbalanced 50", "84.69 : 84.36"),
            ("niid_2", "skew", "96.40 : 93.36"), ("niid_2", "imbalanced 100", "90.92 : 90.27"))
          for claim in claims("table 1" if "1" in split else "table 5", f"{split}, {target}: {{}} is ahead of {{}}",
                              f"runs > {split} > {{}} > * > {target} > accuracy", ("FedSSA", TARGET, published),
                              **PERCENT)),
    ]),
    "ssa/heads": Result("FedSSA in rounds, and our own heads", "4000 of 60 000 images, 8 of 100 rounds", [
        *(claim for table, split, rows in (
            ("table 1", "in order", (("client 1", "99.50 : 95.60"), ("imbalanced 100", "86.97 : 84.34"),
                                     ("imbalanced 50", "84.69 : 82.61"))),
            ("table 5", "NIID-2", (("client 1", "96.40 : 85.87"), ("imbalanced 100", "90.92 : 88.30"),
                                   ("imbalanced 50", "90.20 : 88.62"))))
          for target, published in rows
          for claim in claims(table, f"{split}, {target}: {{}} is more accurate than {{}}",
                              f"runs > {split} > * > {target} > {{}}", ("FedSSA, in rounds", "FedAvg", published),
                              **PERCENT)),
    ]),
    "ssa/heads_published": Result("FedSSA at the paper's scale", "", [
        *claims("table 1", "NIID-1 in order, client 1: {} is more accurate than {}",
                "runs > in order > * > client 1 > {}", ("FedSSA, in rounds", "FedAvg", "99.50 : 95.60"), **PERCENT),
        *(claim for target, published in (("client 1", "99.50 : 95.60"), ("imbalanced 100", "86.97 : 84.34"),
                                        ("imbalanced 50", "84.69 : 82.61"))
          for claim in claims("table 1", f"NIID-1 in order, {target}: {{}} is more accurate than {{}}",
                              f"runs > in order > * > {target} > {{}}",
                              *((way, "FedAvg", published) for way in ("FedSSA, Adam", "FedSSA, SGD")),
                              differs="weights learnt once, after training", **PERCENT)),
    ]),
    "ssa/heads_cifar10": Result("FedSSA on CIFAR-10", "10 000 images, 20 of 100 rounds", [
        *claims("table 1", "CIFAR-10, NIID-1 in order, client 1: {} is more accurate than {}",
                "runs > in order > * > client 1 > {}", ("FedSSA, in rounds", "FedAvg", "90.00 : 56.10"), **PERCENT),
        *claims("table 5", "CIFAR-10, NIID-2, client 1: {} is more accurate than {}",
                "runs > NIID-2 > * > client 1 > {}", ("FedSSA, in rounds", "FedAvg", "79.79 : 65.15"), **PERCENT),
        *(claim for order in ("in order", "shuffled")
        for target, gain in (("client 1", "+40.45"), ("imbalanced 100", "+12.63"), ("uniform", "+0.02"))
          for claim in claims("table 3", f"CIFAR-10, NIID-1 {order}, {target}: {{}} is more accurate than {{}}",
                              f"runs > {order} > * > {target} > {{}}",
                              *((way, "FedAvg", gain) for way in ("FedSSA, Adam", "FedSSA, SGD")), **PERCENT)),
    ], TABLE_3),
    "ssa/table_6": Result("FedSSA: the number of clients", "Fashion-MNIST instead of CIFAR-10, 16 of 100 rounds", [
        claim for clients, published in ((5, "81.78 : 65.10"), (10, "79.79 : 65.15"), (20, "81.46 : 77.94"))
        for claim in claims("table 6", f"{clients} clients: {{}} is more accurate than {{}}",
                            f"runs > {{}} > {clients} > * > accuracy", ("FedSSA", "FedAvg", published), **PERCENT)
    ]),
    "ssa/weights": Result("FedSSA: weights for finished runs", "Fashion-MNIST instead of CIFAR-10, 3000 images", [
        *(claim for target, gain in (("skew", "+40.45"), ("imbalanced 100", "+12.63"), ("uniform", "+0.02"))
          for claim in claims("table 3", target + ": FedSSA, learnt once ({}), is more accurate than {}",
                              f"found > niid_1 > seeds > * > {target} > {{}}", ("SGD, λ_var 10", "FedAvg", gain),
                              **PERCENT)),
        *claims("table 9", "skew: FedSSA ({}) is more accurate than {}", "found > niid_1 > seeds > * > skew > {}",
                ("SGD, λ_var 10", "similarity", "90.00 : 72.50"), ("SGD, λ_var 10", "confidence", "90.00 : 70.00"),
                **PERCENT),
        *claims("table 2", "skew: {} is more accurate than {}", "found > niid_1 > votes > skew > {}",
                ("sample-wise FedSSA", "FedAvg + ensemble", "72.50 : 69.70"), **PERCENT),
        Claim("table 4", "skew: the first client's model is more accurate than the others'",
              "found > niid_1 > single > skew > 0",
              tuple(f"found > niid_1 > single > skew > {other}" for other in range(1, 5)), "97.30 : .50",
              entry=lambda at: f"client {at + 1}", **PERCENT),
    ], TABLE_3),
}  # fmt: skip
