"""Tables 6.3, 6.4, A.13 and A.14 of Acar, thesis 2023, in their layout, for a machine with a GPU.

    FEDLOOM_DATA=... python recipes/distill/tables.py --table 6.3 --data cifar100 [--only "resnet18 > resnet10_s"]
    FEDLOOM_DATA=... python recipes/distill/tables.py --table 6.4
    FEDLOOM_DATA=... python recipes/distill/tables.py --table A.14
    python recipes/distill/tables.py --table A.13 --imagenet imagenet.npz
    python recipes/distill/tables.py --table 6.3 --write       # rebuild the table from the stored results

Settings are those of A.1.5: 200 rounds after a warm start of 200 epochs of cross entropy, SGD with momentum .9 and a
cosine from .1, batches of 200, weight decay 5e-4, tau 4, K 20, lambda from .1 to 50 in periods of 50 rounds, three
passes of guide and student in a round of DiSK, the budget the error of the warm-started student; crop, flip,
AutoAugment and cutout of 16 for all networks, which have batch normalisation. Teachers are trained by cross entropy in
the same way. alpha is .1 for KD and DiSK; the thesis reports the best of 0, .1, .5, .9 and 1 (--alpha).

``--budget passes`` gives every student the same number of passes instead. Accuracies are
those of the epoch chosen on a tenth of the training images; with ``--as-published``, the best on the test images.

Table A.13 asks for ImageNet and for networks of timm with its weights (the package timm). Images are read by
mini-batch, from an npz file, or from a folder with x_train.npy (uint8 [N, 224, 224, 3]) and so on, which stays on disk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.data import sources
from fedloom.data.sources.arrays import as_bytes
from fedloom.experiment.callbacks import make_progress
from fedloom.experiment.console import make_console
from fedloom.experiment.rundir import RunDirectory
from fedloom.models import models
from fedloom_apps import distill
from fedloom_apps.distill import (
    Distiller,
    DistillExperiment,
    SGDConfig,
    Splits,
    ce,
    disk,
    fitnet,
    kd,
    semckd,
    simkd,
    simkd_disk,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from reporting import machine, notes, read, reports_errors, rounded, table, write

RESULTS = Path(__file__).parent / "results"
CUTOUT = {"name": "cutout", "size": 16}
AUGMENT = {
    "cifar100": ("crop", "flip", "autoaugment", CUTOUT),
    "tiny_imagenet": ("crop", "flip", "autoaugment", CUTOUT),
}
NETWORKS: dict[str, dict[str, Any]] = {
    **{name: {"name": name, "norm": "batch"} for name in (
        "resnet34", "resnet18", "resnet10", "resnet10_l", "resnet10_m", "resnet10_s", "resnet10_xxs", "resnet8x4",
        "resnet32x4", "shufflenet_v2")},
    "mobilenet_v2x2": {"name": "mobilenet_v2", "norm": "batch"},
    "wrn_16_2": {"name": "wide_resnet", "depth": 16, "width": 2, "norm": "batch"},
    "wrn_40_1": {"name": "wide_resnet", "depth": 40, "width": 1, "norm": "batch"},
    "wrn_40_2": {"name": "wide_resnet", "depth": 40, "width": 2, "norm": "batch"},
    "timm_resnet18": {"name": "timm", "network": "resnet18"},
    "timm_resnet50": {"name": "timm", "network": "resnet50", "pretrained": True},
    "vit_tiny": {"name": "timm", "network": "vit_tiny_patch16_224"},
    "vit_large": {"name": "timm", "network": "vit_large_patch16_224", "pretrained": True},
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A table: pairs of networks, columns, and the published accuracies by data set, pair and column."""

    pairs: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    data: tuple[str, ...]
    published: dict[str, dict[tuple[str, str], tuple[float | None, ...]]]
    gains: tuple[tuple[str, str], ...]


LARGE = tuple((t, s) for t in ("resnet10_l", "resnet10", "resnet18", "resnet34")
              for s in ("resnet10_xxs", "resnet10_s", "resnet10_m"))  # fmt: skip
SMALL = tuple(("resnet32x4", s) for s in ("resnet8x4", "shufflenet_v2", "wrn_16_2", "mobilenet_v2x2"))
SMALL += tuple(("wrn_40_2", s) for s in ("resnet8x4", "shufflenet_v2", "wrn_40_1", "mobilenet_v2x2"))
FEW = (("wrn_40_2", "resnet8x4"), ("wrn_40_2", "wrn_40_1"))
CIFAR_63 = (
    (71.99, 32.05, 32.64, 37.56), (71.99, 52.16, 54.92, 58.14), (71.99, 65.24, 66.96, 70.03),
    (75.25, 32.05, 34.25, 37.84), (75.25, 52.16, 54.95, 58.36), (75.25, 65.24, 67.27, 70.15),
    (76.56, 32.05, 34.16, 37.80), (76.56, 52.16, 55.76, 58.11), (76.56, 65.24, 68.09, 69.86),
    (80.46, 32.05, 33.93, 37.78), (80.46, 52.16, 54.19, 58.02), (80.46, 65.24, 66.78, 69.89),
)  # fmt: skip
TINY_63 = (
    (52.14, 17.44, 17.59, 18.62), (52.14, 34.65, 35.77, 37.43), (52.14, 44.74, 46.01, 48.03),
    (56.04, 17.44, 17.96, 18.55), (56.04, 34.65, 36.11, 37.37), (56.04, 44.74, 46.08, 48.19),
    (62.48, 17.44, 17.47, 18.53), (62.48, 34.65, 35.59, 37.50), (62.48, 44.74, 45.91, 47.70),
    (63.06, 17.44, 17.67, 18.91), (63.06, 34.65, 35.43, 37.68), (63.06, 44.74, 45.89, 47.60),
)  # fmt: skip
CIFAR_64 = (
    (81.45, 73.89, 76.25, 76.92, 74.32, 76.23, 78.08), (81.45, 73.74, 79.13, 80.23, 75.82, 77.62, 78.39),
    (81.45, 74.26, 76.28, 77.67, 74.70, 75.65, 77.17), (81.45, 69.24, 76.05, 77.24, 73.09, 73.98, 75.43),
    (78.41, 73.89, 75.15, 76.05, 75.02, 75.85, 76.75), (78.41, 73.74, 75.81, 78.33, None, None, None),
    (78.41, 72.81, 74.44, 75.92, 74.17, 74.40, 75.56), (78.41, 69.24, 73.92, 76.32, None, None, None),
)  # fmt: skip
CIFAR_A14 = ((78.41, 73.89, 75.15, 76.05, 75.02, 75.85, 76.75, 77.13),
             (78.41, 72.81, 74.44, 75.92, 74.17, 74.40, 75.56, 76.21))  # fmt: skip
ANSWERS, FEATURES = ("CE", "KD", "DiSK"), ("FitNet", "SemCKD", "SimKD")


def by_pair(pairs: Sequence[tuple[str, str]], rows: Sequence[tuple[float | None, ...]]) -> dict[Any, Any]:
    """Published rows by their pair."""
    return dict(zip(pairs, rows, strict=True))


PAGES = {
    "6.3": Page(LARGE, ANSWERS, ("cifar100", "tiny_imagenet"),
                {"cifar100": by_pair(LARGE, CIFAR_63), "tiny_imagenet": by_pair(LARGE, TINY_63)}, (("DiSK", "KD"),)),
    "6.4": Page(SMALL, ANSWERS + FEATURES, ("cifar100",), {"cifar100": by_pair(SMALL, CIFAR_64)}, (("DiSK", "KD"),)),
    "A.13": Page((("timm_resnet50", "timm_resnet18"), ("vit_large", "vit_tiny")), ANSWERS, ("npz",),
                 {"npz": {("timm_resnet50", "timm_resnet18"): (None, 69.73, 71.29, 72.35),
                          ("vit_large", "vit_tiny"): (None, 75.45, None, 77.86)}}, ()),
    "A.14": Page(FEW, (*ANSWERS, *FEATURES, "SimKD + DiSK"), ("cifar100",), {"cifar100": by_pair(FEW, CIFAR_A14)},
                 (("DiSK", "KD"), ("SimKD + DiSK", "SimKD"))),
}  # fmt: skip


def method(name: str, alpha: float) -> Distiller:
    """The composition of a column."""
    compositions = {
        "CE": ce(),
        "KD": kd(alpha),
        "DiSK": disk(alpha, guide_lr=0.1),
        "FitNet": fitnet(),
        "SemCKD": semckd(),
        "SimKD": simkd(),
    }
    return (compositions | {"SimKD + DiSK": simkd_disk(guide_lr=0.1)})[name]


def network(name: str, splits: Splits) -> Any:
    """The factory of a network for these data."""
    about = NETWORKS[name]
    settings = {key: value for key, value in about.items() if key != "name"}
    fixed = {"classes": splits.train.classes, "inputs": tuple(splits.train.x.shape[1:])}
    return partial(models.make, about["name"], **fixed, **settings)


def experiment(args: argparse.Namespace, column: str, names: tuple[str, str], splits: Splits, start: Path | None,
               teacher_run: Path | None) -> DistillExperiment:  # fmt: skip
    """The run of one cell; ``names`` are the teacher's and the student's."""
    distiller = method(column, args.alpha)
    return DistillExperiment(
        distiller,
        splits,
        network(names[1], splits),
        teacher_run if distiller.needs_teacher else None,
        epochs=args.epochs,
        budget=args.budget,
        start=start if distiller.warm else None,
        training=SGDConfig(batch_size=args.batch_size, lr=0.1),
        augment=AUGMENT.get(args.data, ("crop", "flip")),
        every=args.every,
        seed=args.seed,
        device=args.device,
        config={"command": "distill", "method": {"name": distiller.name}, "model": NETWORKS[names[1]]},
    )


def train(out: Path, trial: DistillExperiment, label: str) -> Path:
    """The run directory, in which the run is started or continued."""
    if not RunDirectory(out).status.ended:
        with make_progress(make_console()) as progress:
            progress.label = label
            distill.run(trial, out, resume=True, callbacks=[progress])
    return out


def cells(args: argparse.Namespace, page: Page, splits: Splits, pair: tuple[str, str], runs: Path) -> dict[str, float]:
    """The accuracies of a row; rows share networks and warm starts."""
    teacher, student = pair
    teacher_run = train(runs / f"ce-{teacher}", experiment(args, "CE", (teacher, teacher), splits, None, None), teacher)
    accuracies = {"Teacher": accuracy(teacher_run, args.as_published)}
    first = train(runs / f"ce-{student}", experiment(args, "CE", pair, splits, None, None), student)
    for column in page.columns:
        if column == "CE":
            accuracies[column] = accuracy(first, args.as_published)
            continue
        start = first if args.budget == "published" else None
        label = f"{teacher} > {student}: {column}"
        where = runs / f"{column.lower().replace(' + ', '_')}-{teacher}-{student}"
        trial = experiment(args, column, pair, splits, start, teacher_run)
        accuracies[column] = accuracy(train(where, trial, label), args.as_published)
    return accuracies


def accuracy(out: Path, as_published: bool) -> float:
    """The reported accuracy of a run."""
    return float(RunDirectory(out).summary()["as_published" if as_published else "selected"]["accuracy"])


def markdown(page: Page, title: str, results: dict[str, Any]) -> str:
    """The table in the thesis' layout, our figures before the published ones."""
    text = [f"# Table {title} of Acar, thesis 2023", "", "Accuracy in percent; in brackets the published one.", ""]
    for data in page.data:
        header = ["teacher", "student", "Teacher", *page.columns, *(f"{a} over {b}" for a, b in page.gains)]
        rows = []
        for pair in page.pairs:
            figures = results["rows"].get(data, {}).get(" > ".join(pair), {})
            paper = dict(zip(("Teacher", *page.columns), page.published[data][pair], strict=False))
            row = [cell(figures.get(column), paper.get(column)) for column in ("Teacher", *page.columns)]
            for a, b in page.gains:
                gain = None if a not in figures or b not in figures else figures[a] - figures[b]
                paper_a, paper_b = paper.get(a), paper.get(b)
                row.append(cell(gain, None if paper_a is None or paper_b is None else paper_a - paper_b))
            rows.append([*pair, *row])
        text += [f"## {data}", "", table(header, rows), ""]
    about = results.get("settings")
    return "\n".join([*text, f"`{results['command']}`", "", f"{about or 'Nothing was run yet.'}", *notes(results)])


def cell(value: float | None, published: float | None) -> str:
    """Our figure and the published one."""
    return f"{'–' if value is None else f'{100 * value:.2f}'} ({'–' if published is None else f'{published:.2f}'})"


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what a table is missing, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=PAGES, required=True)
    parser.add_argument("--data", default=None, help="cifar100 or tiny_imagenet")
    parser.add_argument(
        "--imagenet", type=Path, default=None, help="an npz file or a folder of npy files, for table A.13"
    )
    parser.add_argument("--only", nargs="+", default=None, help='rows, like "resnet18 > resnet10_s"')
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--budget", choices=("published", "passes"), default="published")
    parser.add_argument("--as-published", action="store_true", help="choose the epoch on the test images")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--every", type=int, default=3, help="student passes between two evaluations")
    parser.add_argument("--samples", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path("runs/distill/tables"), help="run directories")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="only write the table again")
    args = parser.parse_args(arguments)
    page, path = PAGES[args.table], args.out / f"table_{args.table.replace('.', '_').lower()}.json"
    results: dict[str, Any] = {
        "rows": {},
        "notes": [],
        "command": f"python recipes/distill/tables.py --table {args.table}",
    }
    results |= read(path)
    args.data = args.data or page.data[0]
    if not args.write:
        settings = {"path": str(args.imagenet)} if args.data == "npz" else {}
        with as_bytes():
            splits = Splits.of(sources.make(args.data, **settings), samples=args.samples)
        runs = args.runs / f"{args.data}-{args.budget}-{args.epochs}-{args.seed}"
        for pair in page.pairs:
            if args.only is None or " > ".join(pair) in args.only:
                row = {k: rounded(v) for k, v in cells(args, page, splits, pair, runs).items()}
                results["rows"].setdefault(args.data, {})[" > ".join(pair)] = row
                choice = "test" if args.as_published else "validation"
                results["settings"] = (
                    f"budget={args.budget}, {args.epochs} epochs, alpha {args.alpha}, seed {args.seed}, "
                    f"{len(splits.train)} training images, epoch chosen on {choice} images; {machine()}"
                )
                write(path, results)
    write(path.with_suffix(".md"), markdown(page, args.table, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
