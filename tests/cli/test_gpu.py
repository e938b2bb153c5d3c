"""Every command on a GPU, where there is one; by default it is used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import Cli

import fedloom as fl

pytestmark = pytest.mark.cuda
SMALL = ("clients=5", "model.hidden=[8]", "local.batch_size=50", "rounds=2")
GENERATED = ("clients=2", "local.steps=2", "local.batch_size=20", "judge.max_steps=30", "judge.classifier=mlp")
COMMANDS = {
    "run": ("run", "method=fedavg", *SMALL),
    "run, personal": ("run", "method=superfed_mm", *SMALL),
    "run, adapted": ("run", "method=pfldyn", *SMALL),
    "run, private": ("run", "method=fedavg", "local.dp_clip=1", "local.dp_noise=1", *SMALL),
    "run, compressed": ("run", "method=feddyn", "method.uplink=[top_k]", *SMALL),
    "run, images": ("run", "method=scaffold", "model=two_cnn", "augment=[crop,flip]", "local.clip=1", "rounds=2"),
    "online": ("online", "tasks=4", "local.steps=2", "model.hidden=[8]", "measures.ltm_every=2"),
    "distill": ("distill", "epochs=2", "teacher_epochs=2", "teacher.hidden=[16]"),
    "synthesize, energy": ("synthesize", "method=fedevg", "model.channels=[8,8]", "rounds=1", *GENERATED),
    "synthesize, GAN": ("synthesize", "method=fedcgan", "model.width=8", "rounds=1", *GENERATED),
    "search": (
        "search", "clients=6", "rounds=4", "model=logistic", "local.epochs=1", "search.methods=[fedavg,feddyn]",
        "search.budget=20", "search.rungs=1", "search.eta=2", "search.finalists=1", "search.seeds=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_does_on_a_gpu_what_it_does_on_the_host(name: str, cli: Cli, tmp_path: Path) -> None:
    for device in ("auto", "cpu"):
        code, _, err = cli(*COMMANDS[name], f"device={device}", f"out={device}")
        assert (code, err) == (0, ""), f"{device}: {err}"
    assert torch.cuda.max_memory_allocated() > 0, "no GPU was used"
    assert {path.name for path in (tmp_path / "auto").iterdir()} == {path.name for path in (tmp_path / "cpu").iterdir()}


def test_an_interrupted_run_goes_on_to_the_same_bits(cli: Cli, tmp_path: Path) -> None:
    words = ("method=feddyn", "evaluation.what=[global,clients,average]", *SMALL[:3])
    assert cli("run", "-q", *words, "rounds=4", "out=whole").code == 0
    assert cli("run", "-q", *words, "rounds=2", "out=half").code == 0
    assert cli("run", "-q", "resume=half", "rounds=4").code == 0
    ends = [fl.load(tmp_path / name).server.module.state_dict() for name in ("whole", "half")]
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())


def test_what_a_run_has_learnt_is_used(cli: Cli) -> None:
    assert cli("run", "-q", "method=fedrep", "out=done", *SMALL).code == 0
    run = fl.load("done")
    test = run.federation.held_out.client(3)
    np.savez("test.npz", x=test.x.cpu().numpy(), y=test.y.cpu().numpy())
    answer = cli("predict", "run=done", "test.npz", "--client", "3")
    assert (answer.code, "accuracy" in answer.err) == (0, True), answer.err
    assert cli("export", "run=done", "--client", "3").code == 0
    np.savez("some.npz", x=run.federation.test.x[:60].cpu().numpy())
    assert cli("run", "-q", "method=fedavg", "out=common", *SMALL).code == 0
    target = cli("target", "run=common", "data=some.npz")
    assert target.code == 0, target.err
    assert "accuracy" in json.dumps(json.loads(Path("done/summary.json").read_text()))
