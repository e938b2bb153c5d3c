"""Claims of PFLlib's benchmark (Zhang et al., JMLR 2025): the order of personal methods."""

from __future__ import annotations

from .measures import Result, claims

NAMES = ("FedAvg", "Ditto", "FedFomo", "FedAMP", "FedALA", "FedPer", "FedRep")
PUBLISHED = {  # Fashion-MNIST: mean accuracy over clients in percent, in the order of ``NAMES``
    "classes": ("pathological label skew", (80.41, 99.44, 99.46, 99.42, 99.57, 99.47, 99.56)),
    "dirichlet": ("practical label skew", (85.85, 97.47, 97.21, 97.20, 97.66, 97.44, 97.56)),
}
SPLITS = {"classes": "two classes a client", "dirichlet": "Dirichlet .1"}
DIFFERS = (
    "MNIST instead of Fashion-MNIST, 10 000 images, 100 clients instead of 20, a small perceptron, 20 of 2000 rounds, "
    "of which the last one counts and not the best"
)


def pairs(figures: dict[str, float]) -> list[tuple[str, str, str]]:
    """FedALA ahead of every other method, and every personal method ahead of FedAvg."""
    ahead = [("FedALA", other) for other in NAMES if other != "FedALA"]
    ahead += [(name, "FedAvg") for name in NAMES if name not in ("FedAvg", "FedALA")]
    return [(method, other, f"{figures[method]:.2f} : {figures[other]:.2f}") for method, other in ahead]


RESULTS: dict[str, Result] = {
    "topology/personal_mnist": Result("A model for every client on MNIST (PFLlib)", DIFFERS, [
        claim for split, (table, figures) in PUBLISHED.items()
        for claim in claims(table, SPLITS[split] + ": {} is more accurate than {}", f"cells > {split} > {{}} > *",
                            *pairs(dict(zip(NAMES, figures, strict=True))), unit=100, digits=2,
                            measure=lambda run, _: run["mean"], cost=(lambda run, _: run["megabytes"], "MB"))
    ]),
}  # fmt: skip
