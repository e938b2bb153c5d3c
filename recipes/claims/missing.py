"""What the papers show and neither stored results nor claim files are about, chapter by chapter, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lack = Literal["time", "data"]
WORDS: dict[Lack, str] = {
    "time": "a recipe is here; it takes a GPU, or hours to days",
    "data": "the data are not at hand",
}


@dataclass(frozen=True)
class Missing:
    """Tables or figures of a chapter that no result or claim file is about, at least not at the published scale."""

    chapter: str
    where: str
    what: str
    lacks: Lack


def chapter(title: str, *rows: tuple[str, str, Lack]) -> tuple[Missing, ...]:
    """What is missing from one chapter."""
    return tuple(Missing(title, *row) for row in rows)


MISSING = (
    *chapter("Acar 3, personal models", ("A.7", "miniImageNet", "data")),
    *chapter(
        "Acar 5, MOML",
        ("5.1", "miniImageNet", "data"),
        ("5.1 to 5.4, A.8 to A.10", "tasks of 3 and 4 classes (`online/tables.py --settings cifar100_3`)", "time"),
        ("5.2 to 5.4", "B-MOML, and MOML with ∇ = 0, on CIFAR-100, where the thesis gains most by ∇", "time"),
        ("figure A.20", "5-way CIFAR-100: 180 samples suffice after 110 tasks", "time"),
    ),
    *chapter(
        "Acar 6, DiSK",
        ("6.3, A.13, A.14", "the full scale, with α scanned over {0, .1, .5, .9, 1}", "time"),
        ("6.4", "TinyImageNet and ImageNet", "data"),
    ),
    *chapter(
        "Acar 7, local losses",
        (
            "7.1",
            "CIFAR-100 with distillation (`sides/table_7_1.py --scale thesis`): 170 hours of a core for a teacher, "
            "then 16 minutes a round, 26 with robustness",
            "time",
        ),
    ),
    *chapter(
        "Hahn II, SuPerFed",
        ("2.4", "TinyImageNet", "data"),
        ("2.5", "FEMNIST", "data"),
        ("figure 2.3", "CIFAR-10: the grid of ν and μ", "time"),
    ),
    *chapter(
        "Hahn III, AAggFF",
        ("3.6, 3.8", "Berka, MQP and ISIC 2019 (table 3.5 prints 21 310 images, the data have 23 247)", "data"),
        ("3.7, 3.9", "CelebA, Reddit and SpeechCommands", "data"),
        ("3.10", "TinyImageNet", "data"),
    ),
    *chapter(
        "Hahn IV, FedEvg",
        ("4.2 to 4.5", "CIFAR-10 and 100 clients", "time"),
        ("4.2 to 4.5", "DermaMNIST and OrganCMNIST", "data"),
    ),
    *chapter(
        "FedSSA",
        ("tables 1, 5", "CINIC-10", "data"),
        ("tables 1, 5", "local training, at full scale", "time"),
    ),
)
