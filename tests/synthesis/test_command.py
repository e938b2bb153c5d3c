"""``fedloom synthesize`` end to end, and its error messages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Cli
from helpers.marks import kinds

from fedloom.base import yaml
from fedloom.data.sources.generated import read_generated

SMALL = ("clients=2", "local.steps=2", "local.batch_size=20", "judge.max_steps=30", "judge.classifier=mlp")
NARROW = {"fedevg": "model.channels=[8,8]", "fedcgan": "model.width=8", "fedcvae": "model.width=8"}


@pytest.mark.parametrize("name", kinds(NARROW, ["fedcvae"]))
def test_each_method_runs_and_its_set_is_data_for_another_run(cli: Cli, tmp_path: Path, name: str) -> None:
    words = (f"method={name}", NARROW[name], "rounds=2", "judge.every=1", "out=made", *SMALL)
    code, out, err = cli("synthesize", *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "  synthetic set " in lines[0].partition(f"{name}  round 1/2")[2], lines[0]
    heads = ["method", "accuracy", "clients", "recognised", "FID", "diversity", "coverage", "copies", "sent", "time"]
    assert next(line for line in lines if line.startswith("method")).split() == heads
    assert "Copies: samples nearer to training data than" in out
    folder = tmp_path / "made"
    assert {"synthetic.npz", "synthetic.parquet", "synthetic.json", "report.html"} <= {p.name for p in folder.iterdir()}
    page = (folder / "report.html").read_text()
    assert "Synthetic data" in page
    assert page.count("<figure>") >= 3, "curves, real images, the set"
    assert yaml.load(folder / "config.yaml")["judge"]["max_steps"] == 30
    assert read_generated(folder / "synthetic.npz").provenance["settings"]["name"] == name
    common = ("method=centralised", "clients=1", "partition=iid", "held_out=0", "participation=1", "rounds=1")
    for file in ("synthetic.npz", "synthetic.parquet"):
        source = ("data=generated", f"data.path=made/{file}", f"out={file}-run")
        assert cli("run", "-q", *common, *source).code == 0
        final = json.loads((tmp_path / f"{file}-run" / "summary.json").read_text())["final"]
        assert 0 <= final["global/accuracy"] <= 1


def test_by_default_fedevg_imitates_digits(cli: Cli, tmp_path: Path) -> None:
    """Its step sizes follow the number of rounds, so that it cannot be given more of them."""
    assert cli("synthesize", "-q", "rounds=1", "out=made", "method.per_class=6", *SMALL).code == 0
    provenance = json.loads((tmp_path / "made" / "synthetic.json").read_text())["provenance"]
    assert (provenance["method"], provenance["data"], provenance["rounds"]) == ("fedevg", {"name": "digits"}, 1)
    code, _, err = cli("synthesize", "-q", "resume=made", "rounds=2")
    assert code == 2
    assert err == (
        "fedloom: made holds another experiment, so it cannot be continued: rounds: 1 → 2, and what fedevg does "
        "depends on the number of its rounds; start a new run with rounds=2 in another directory, with out=.\n"
    )


def test_a_generator_goes_on(cli: Cli, tmp_path: Path) -> None:
    assert cli("synthesize", "-q", "method=fedcvae", "model.width=8", "rounds=1", "out=made", *SMALL).code == 0
    code, _, err = cli("synthesize", "-q", "resume=made", "rounds=2")
    assert (code, err) == (0, "")
    provenance = json.loads((tmp_path / "made" / "synthetic.json").read_text())["provenance"]
    assert provenance["rounds"] == 2
    _, _, err = cli("synthesize", "-q", "resume=made", "judge.every=1")
    assert err.startswith("fedloom: 'made' cannot be continued with other settings (judge.every: 0 → 1)")


def test_a_sweep_keeps_its_judges_and_is_compared(cli: Cli, tmp_path: Path) -> None:
    words = ("method=fedcvae", "model.width=8", "seed=1,2", "rounds=1", "out=both", *SMALL)
    code, out, err = cli("synthesize", "-q", "-m", *words)
    assert (code, err) == (0, "")
    assert sorted(p.name for p in (tmp_path / "both").iterdir() if p.is_dir()) == [
        "fedcvae-1", "fedcvae-2", "judge", "tables",
    ]  # fmt: skip
    assert len(list((tmp_path / "both" / "judge").iterdir())) == 2  # one for each seed's training samples
    assert out.count("fedcvae, seed") == 2
    before = (tmp_path / "both" / "fedcvae-2" / "metrics.jsonl").read_text()
    (tmp_path / "both" / "fedcvae-1" / "synthetic.json").unlink()
    assert cli("synthesize", "-q", "resume=both").code == 0
    assert (tmp_path / "both" / "fedcvae-1" / "synthetic.json").is_file()
    assert (tmp_path / "both" / "fedcvae-2" / "metrics.jsonl").read_text() == before


@pytest.mark.filterwarnings("default:.*with which models train poorly")  # the command prints it
@pytest.mark.parametrize("scale", [(-1, 1), (0, 255)])
def test_images_in_another_range_are_refused_before_they_are_learnt(
    cli: Cli, tmp_path: Path, scale: tuple[float, float]
) -> None:
    x = np.random.default_rng(0).uniform(*scale, (200, 1, 8, 8)).astype(np.float32)
    np.savez("own.npz", x_train=x, y_train=np.arange(200) % 2)
    code, _, err = cli("synthesize", "-q", "data=npz:own.npz", "clients=2", "out=made", *SMALL)
    assert code == 2
    assert "the synthetic images hold values from 0 to 1, the real ones from" in err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("method=fedavg",), "method 'fedavg' generates no samples"),
        (("method=disk",), "method 'disk' generates no samples"),
        (("method=fedevk",), "did you mean 'fedevg'?"),
        (("judge.evry=1",), "judge has no setting 'evry'; did you mean 'every'?"),
        (("judge.every=often",), "judge.every is 'often', but it must be a whole number of at least 0."),
        (("judge.every=-1",), "judge.every must be at least 0"),
        (("judge.every=1,2",), "add -m"),
        (("judge.classifier=lenet",), "unknown model 'lenet'"),
        (("judge.inception=nowhere.pth",), "nowhere.pth cannot be read: "),
        (("judge.augment=[crop,turn]",), "unknown augmentation 'turn'"),
        (("method.per_class=0",), "per_class must be at least 1"),
        (("data=synthetic", "partition=natural", "clients=20"), "energy_cnn"),
        (("resume=nowhere",), "nowhere is not a run directory"),
    ],
)
def test_mistakes_end_in_one_sentence_before_anything_is_written(
    cli: Cli, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    code, out, err = cli("synthesize", "-q", "out=made" if "resume=nowhere" not in words else "seed=0", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_plain_run_is_not_continued_as_one_that_generates(cli: Cli) -> None:
    assert cli("run", "-q", "method=fedavg", "rounds=1", "clients=2", "out=plain").code == 0
    code, _, err = cli("synthesize", "resume=plain")
    assert code == 2
    assert err == "fedloom: 'plain' was not started by fedloom synthesize; continue it with fedloom run resume=plain.\n"


def test_a_dry_run_prints_the_configuration_with_the_judge(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("synthesize", "--dry-run", "judge.every=7")
    assert code == 0
    assert "name: fedevg" in out
    assert "every: 7" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["classifier", "augment", "inception"])
def test_a_dry_run_refuses_what_the_judge_cannot_use(key: str, cli: Cli) -> None:
    code, out, err = cli("synthesize", "--dry-run", f"judge.{key}=nonsense")
    assert (code, out) == (2, "")
    assert "nonsense'" in err
