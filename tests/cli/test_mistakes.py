"""Every user error gives one sentence on standard error and exit code 2; nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.rounds.client import ClientWork

MISTAKES = {
    "rnu": "unknown command 'rnu'; did you mean 'run'?",
    "method=feddyn": "fedloom run method=feddyn",
    "run method=feddin": "unknown method 'feddin'; did you mean 'feddyn'?",
    "run method=feddyn method.name=fedavg": "method=feddyn and method.name=fedavg choose two; leave one out.",
    "run model=timm model.name=resnet18": "choose two; the network of timm is model.network=resnet18.",
    "run metod=feddyn": "unknown key 'metod'; did you mean 'method'?",
    "run lr=0.1": "did you mean 'local.lr'?",
    "run alpha=0.1": "unknown key 'alpha'; did you mean 'method.alpha' or 'partition.alpha'?",
    "run learning_rate=0.1": "unknown key 'learning_rate'; take local.lr instead.",
    "run optimizer=adam": "unknown key 'optimizer'; take local.optimiser instead.",
    "run method=fedopt": "take fedadam, fedyogi, fedadagrad or fedavgm, FedAvg with that optimiser at the server, inst",
    "run schedule=synchronous": "unknown schedule 'synchronous'; take rounds instead.",
    "run partition=lda": "unknown partition 'lda'; take dirichlet instead.",
    "run evaluation.metrics=[acc]": "unknown metric 'acc'; take accuracy instead.",
    "run method.objective=[mse]": "unknown objective 'mse'; take squared_error instead.",
    "run .": "'.' is a folder; write resume=. to continue a run, config.yaml to repeat it.",
    "report run=nix": "/nix is not a run directory",
    "run server=adam": "unknown key 'server'; did you mean 'method.server'?",
    "run mixing.q=1": "unknown key 'mixing'; did you mean 'method.mixing'?",
    "run local.lrr=1": "local has no setting 'lrr'; did you mean 'lr'?",
    "run method=feddyn method.alpha=1 method.drift=scaffold": "method.alpha has no effect beside "
    "method.drift; leave one of them out.",
    "run method=feddyn method.alpha=3 method.drift.alpha=2": "method.alpha has no effect beside method.drift",
    "run method=fedprox method.mu=5 method.objective=[cross_entropy]": "method.mu has no effect beside method.objec",
    "run method=feddyn method.alfa=1": "method 'feddyn' has no setting or slot 'alfa'; did you mean 'alpha'?",
    "run method=fedavg method.mixin=uniform": "did you mean 'mixing'?",
    "run method.mixing=unifrom": "unknown mixing 'unifrom'; did you mean 'uniform'?",
    "run method=fedavg method.server.lr=2": "choose a part first, with method.server=",
    "run method.objective=[cross_entropy,proximl]": "unknown objective 'proximl'; did you mean 'proximal'?",
    "run method.uplink=[top_k] method.uplink.bits=4": "write the part first, like method.uplink.qsgd.bits",
    "run method.objective=robustness method.objective.tau=2": "calibrated.tau (contrastive, distillation, inheritance,",
    "run method=distill": "objective 'distillation' needs a trained model",
    "run method=afl": "set participation=1",
    "run method.objective=[proximal]": "no term with a loss on the data; add CrossEntropy(), or cross_entropy to",
    "run method=fedavg method.objective.proximal.mu=1": "method.objective=[cross_entropy, proximal]",
    "run data=digit": "unknown data source 'digit'; did you mean 'digits'?",
    f"run data={'x' * 400}": "unknown data source 'xxx",
    "run data=visits.csv": "to read it, write table:visits.csv",
    "run data.name=table:visits.csv": "write {name: table, path: visits.csv}",
    "run data=.": "to read it, write folder:.",
    "data table:visits.csv": "there is no file",
    "data npz:visits.npz": "visits.npz",
    "train": "there are: claim, completion, data, deploy, devices, distill,",
    "run --method feddyn": "settings are typed method=feddyn, without dashes.",
    "partition --clients 5": "settings are typed clients=5, without dashes.",
    "run -method=feddyn": "has no option '-method=feddyn'; settings are typed method=feddyn, without dashes.",
    "run method=fedavg evaluation.metric=global/acc": "evaluation.metric is 'global/acc', which is never measured",
    "run partition=pathologic": "did you mean 'pathological'?",
    "run model=mpl": "did you mean 'mlp'?",
    "run model.classes=3": "model 'mlp' has no setting 'classes'",
    "run engine=seriel": "did you mean 'serial'?",
    "run local.lr=fast": "local.lr is 'fast', but it must be a number",
    "run rounds=1.5": "rounds is 1.5, but it must be a whole number",
    "run clients=many": "clients is 'many', but it must be a whole number or null",
    "run evaluation.what=[globl]": "unknown evaluation 'globl'; did you mean 'global'?",
    "run evaluation.target=1.5": "(0, 1]",
    "run method=local method.drift=scaffold": "drift 'scaffold' works on shared parameters, but personal 'local_only'",
    "run method=scaffold local.optimiser=adam": "drift 'scaffold'",
    "run participation=2": "participation is 2, but it must lie in (0, 1]",
    "run cohort=21": "between 1 and the number of clients, 20",
    "run participation=.3 cohort=3": "participation=0.3 and cohort=3 both set the size of cohorts; leave one out.",
    "run clients=5000": "samples cannot give 5000 clients",
    "run partition=shards partition.shards=1000": "more shards than samples",
    "run partition.alpha=-1": "alpha",
    "run model=two_cnn data=synthetic method=fedavg": "needs images",
    "run model=feddyn_cnn": "at least 16 by 16",
    "run seed=1,2": "add -m",
    "run local.lr=.1,.2": "add -m to run each of them, or write a list as [a,b].",
    "online learner=moml,ftml": "add -m to run each of them.",
    "run method.drift=scaffold,feddyn": "add -m to run each of them.",
    "run seed=[1": "cannot be read: a bracket, brace or quote is left open",
    "run -m seed=range(0,3,0)": "'seed=range(0,3,0)': the step of a range must not be zero.",
    "run -m seed=1,": "cannot be read: a bracket, brace or quote is left open, a comma is misplaced,",
    "run +seed=1": "'+seed=1' is not a setting; write it as key=value",
    "run seed": "write it as key=value",
    "run deploy.nodes=3": "these are settings of a deployment; start it with fedloom deploy local or deploy server.",
    "run nix.yaml": "there is no file 'nix.yaml'",
    "run a.yaml b.yml": "takes one recipe",
    "run --nix": "has no option '--nix'; there are: --debug",
    "run -m method=fedavg,feddin": "unknown method 'feddin'",
    "run -m method=fedavg,local method.drift=scaffold": "drift 'scaffold'",
    "run -m clients=10,5000": "samples cannot give 5000 clients",
    "run method=fedavg data=npz": "data source 'npz' needs a value for 'path'; give it as data.path=",
    "run method=fedavg data=npz data.path=nix.npz": "nix.npz",
    "run method=fedavg resume=": "resume= names no run directory; leave it out to start a new run.",
    "run resume=nix": "nix is not a run directory: there is no such directory",
    "run resume=nix out=there": "cannot be combined with out=",
    "run checkpoint.every=0": "checkpoint.every must be at least 1, not 0",
    "run device=tpu": "unknown device 'tpu'",
    "run -m method=fedavg device=cpu,tpu": "unknown device 'tpu'",
    "run augment=crp": "unknown augmentation 'crp'; did you mean 'crop'?",
    "run trackers=[tensorbord]": "unknown tracker 'tensorbord'; did you mean 'tensorboard'?",
    "target data=x.npz": "needs the directory of a finished run, run=DIR",
    "target run=nix": "needs files of inputs, like",
    "target run=nix x.npz": "needs files of inputs, like",
    "target run=nix data=x.npz": "nix is not a run directory",
    "target run=nix data=x.npz method=nix": "unknown method for a target 'nix'; there are: ccvr, fedssa, target_fit",
    "target run=nix data=x.npz method=ccvr": "ccvr calibrates one model and takes no inputs",
    "target run=nix data=x.npz data=y.npz --out a": "--out names one file, but there are several targets",
    "target run=nix data=x.npz data=x.npz": "would be written twice",
    "predict x.npz": "needs the directory of a finished run, run=DIR",
    "predict run=nix x.npz": "nix is not a run directory",
    "predict run=nix": "needs one file of inputs",
    "predict run=nix x.npz --out y.txt": "ends in .npz or .csv",
    "export run=nix": "nix is not a run directory",
    "export run=nix --format onx": "unknown format 'onx'; did you mean 'onnx'?",
    "report nix out=page": "fedloom report has no setting 'out'; write --out page.",
    "verify nix replay=2": "fedloom verify has no setting 'replay'; write --replay 2.",
    "export run=nix client=3": "fedloom export has no setting 'client'; write --client 3.",
    "export run=nix a.npz": "does not know 'a.npz'",
    "predict run=nix client=3 x.npz": "fedloom predict has no setting 'client'; write --client 3.",
    "target run=nix data=x.npz views=3": "fedloom target has no setting 'views'; write method.views=3.",
    "target run=nix data=x.npz rounds=3": "fedloom target has no setting 'rounds'; see fedloom target --help.",
    "target run=nix method=ccvr rounds=3": "fedloom target has no setting 'rounds'",
    "list feddyn extra": "takes one kind and one name, like fedloom list methods feddyn.",
    "list nix": "no list and no entry named 'nix'",
    "list online": "listed by fedloom list settings online",
    "list methods feddin": "there is no method 'feddin'; did you mean 'feddyn'?",
    "list methods feddyn fedavg": "one kind and one name",
    "partition clients=5000": "samples cannot give 5000 clients",
    "partition --out x.foo": "no known format",
    "report": "at least one run directory",
    "report nix": "is not a run directory",
    "report .": "and contains none",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistake(line: str, cli: Callable[..., Any], tmp_path: Path):
    code, out, err = cli(*line.split(" "))
    assert (code, out) == (2, "")
    assert MISTAKES[line] in err
    assert err.startswith("fedloom: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_where(cli: Callable[..., Any]):
    with pytest.raises(ValueError, match="feddin"):
        cli("run", "method=feddin", "--debug")


def test_debug_prints_the_traceback_of_a_client_that_failed(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    begin = ClientWork.begin

    def stumble(self: ClientWork, steps: int) -> Any:
        if self.client == 2:
            raise RuntimeError("the sample is cursed")
        return begin(self, steps)

    monkeypatch.setattr(ClientWork, "begin", stumble)
    words = ("run", "method=fedavg", "clients=4", "participation=1", "rounds=2", "local.epochs=1", "compute=live", "-q")
    plain, debug = cli(*words, "out=a"), cli(*words, "out=b", "--debug")
    assert plain.code == debug.code == 0
    assert "Traceback" not in plain.err
    assert debug.err.count("Traceback") == 1
    assert "in stumble" in debug.err
    first, second = json.loads(Path("b/summary.json").read_text())["failures"]
    assert first["round"] + 1 == second["round"] == 2
    assert (first["client"], first["kind"], first["reason"]) == (2, "code", "RuntimeError: the sample is cursed")
