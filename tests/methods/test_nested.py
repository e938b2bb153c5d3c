"""Laws of networks of different sizes: what a client holds, how the server mixes, what is sent, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import FEATURES, SIZES, classes
from helpers.nested import ENDS, FAR, NEAR, PLACE, M, flat, layer, places, plain_net, simple_net, two_ends, wide_net
from helpers.networks import IMAGE, images, tanh_net
from helpers.runs import assert_same_run, experiment, go, theta
from parts.test_combinations import Recorder
from torch import Tensor, nn

from fedloom.core.federation import Federation, Index, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.submodels import mean_over_holders
from fedloom.data import federate
from fedloom.data.partitions import Pathological
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.models import EarlyExit, models
from fedloom.parts.mixing import TERM, Uniform
from fedloom.parts.objectives import CrossEntropy, Proximal
from fedloom.parts.personal import EarlyExitSlice, WidthSlice
from fedloom.parts.personal.nested import Simple, is_simple, narrowed
from fedloom.parts.server import Adam
from fedloom.rounds.aggregate import EQUAL, Fold, agreement, buffers_over_holders
from fedloom.rounds.exchange import BUFFERS
from fedloom.rounds.plan import ClientPlan

# Whatever a step does beside the gradient must leave alone what a client does not hold.
LOCAL = Local(epochs=2, batch_size=4, lr=0.2, momentum=0.6, weight_decay=0.05, clip=0.9)
NESTED = ["fedhen", "noside", "decouple", "heterofl"]
REST = np.setdiff1d(np.arange(ENDS[-1]), M)
AVERAGED = Method("averaged", (CrossEntropy(),), mixing=Uniform())


def method(name: str, **settings: Any) -> Method:
    return make(name, **settings)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["fedhen", "noside"])
def test_all_clients_simple_is_fedavg_on_the_simple_net(name: str, dtype: str) -> None:
    """The same bits in M; the rest stays where it was, in spite of momentum, weight decay and clipping."""
    model = theta(go(method(name, simple_fraction=1.0), local=LOCAL, cohort=4, dtype=dtype))
    np.testing.assert_array_equal(model[M], theta(go(AVERAGED, model=simple_net, local=LOCAL, cohort=4, dtype=dtype)))
    np.testing.assert_array_equal(model[REST], flat(two_ends()).astype(dtype)[REST])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_all_clients_complex_without_side_objective_is_fedavg_on_the_complex_net(dtype: str) -> None:
    model = theta(go(method("noside", simple_fraction=0.0), local=LOCAL, cohort=4, dtype=dtype))
    np.testing.assert_array_equal(model, theta(go(AVERAGED, model=two_ends, local=LOCAL, cohort=4, dtype=dtype)))


def normed_ends() -> nn.Module:
    """An early exit, with batch normalisation before and behind it."""
    net = two_ends()
    for name, units in (("near", NEAR), ("far", FAR)):
        net.get_submodule(f"body.{name}").append(nn.BatchNorm1d(units))  # pyright: ignore
    return net


def of_kind(federation: Federation, clients: list[int]) -> Federation:
    """The federation with the data of these clients alone; the others hold one sample, and are never drawn."""
    rows = [federation.train.index[i] for i in clients]
    nothing = Index.of([[] for _ in clients])
    test = federation.test
    return replace(
        federation,
        train=Split(federation.train.arrays, Index.of(rows)),
        validation=Split(test, nothing),
        held_out=Split(test, nothing),
    )


def test_decouple_is_two_federations() -> None:
    """With all data in a batch a client's number decides its kind and rounding alone: each half can run by itself."""
    full_batch = Local(steps=3, batch_size=0, lr=0.2, momentum=0.5, weight_decay=0.05)
    model = theta(go("decouple", local=full_batch))
    simple = go(AVERAGED, federation=of_kind(classes(), [1, 3, 5]), model=simple_net, local=full_batch)
    complex = go(AVERAGED, federation=of_kind(classes(), [0, 2, 4]), model=plain_net, local=full_batch)
    np.testing.assert_allclose(model[: len(M)], theta(simple), rtol=0, atol=1e-14)
    np.testing.assert_allclose(model[len(M) :], theta(complex), rtol=0, atol=1e-14)


def last_exit(theta: np.ndarray, x: np.ndarray, y: np.ndarray, simple: bool) -> float:
    """The mean cross entropy [] of a client's deployed output."""
    (w1, b1), (w2, b2) = layer(theta[PLACE["near"]], FEATURES), layer(theta[PLACE["far"]], NEAR)
    (v, c), (u, d) = layer(theta[PLACE["head"]], FAR), layer(theta[PLACE["exit"]], NEAR)
    a = np.tanh(x @ w1.T + b1)
    logits = a @ u.T + d if simple else np.tanh(a @ w2.T + b2) @ v.T + c
    return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]))


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("response", ["train", "validation"])
@pytest.mark.parametrize("name", ["fedhen", "noside", "decouple"])
def test_losses_that_weigh_clients_are_those_of_their_last_exits(name: str, response: str, compute: str) -> None:
    """TERM by hand: p_i ∝ n_i exp(λF_i), whether a complex client trains its other exit, too, or has none."""
    lam, record = 1.7, Recorder()
    federation = classes()
    federation = replace(federation, validation=federation.held_out)
    fair = replace(make(name), mixing=TERM(lam, response))
    run(experiment(fair, federation=federation, local=LOCAL, rounds=1, compute=compute), callbacks=[record])
    split = federation.train if response == "train" else federation.held_out
    x, y = split.arrays.x.numpy(), split.arrays.y.numpy()
    losses = [last_exit(flat(two_ends()), x[rows], y[rows], is_simple(i, 0.5)) for i, rows in enumerate(split.index)]
    p = np.array(SIZES) * np.exp(lam * np.array(losses))
    np.testing.assert_allclose(record.p[0], p / p.sum(), rtol=1e-12)


def test_heterofl_with_one_share_is_fedavg() -> None:
    model = theta(go(method("heterofl", widths=(1.0,)), local=LOCAL, cohort=4))
    np.testing.assert_array_equal(model, theta(go(AVERAGED, model=wide_net, local=LOCAL, cohort=4)))


@pytest.mark.parametrize("name", ["fedhen", "noside", "decouple"])
def test_without_complex_clients_the_rest_stays_as_it_is(name: str) -> None:
    """One client a round: a round moves what its client holds, and nothing else."""
    rounds = [go(name, local=LOCAL, cohort=1, rounds=t, seed=3) for t in range(1, 7)]
    start = flat(two_ends())
    before = np.concatenate([start[M], np.delete(start, np.s_[32:])]) if name == "decouple" else start
    simple_part = np.arange(len(M)) if name == "decouple" else M
    rest = np.setdiff1d(np.arange(len(before)), simple_part)
    kinds = set()
    for result in rounds:
        after, last = theta(result), result.history[-1]
        simple = last["comm/up_params"] == len(M)
        kinds.add(simple)
        np.testing.assert_array_equal((after != before)[rest].any(), not simple)
        assert (after != before)[simple_part].any() == (simple or name != "decouple")
        before = after
    assert kinds == {True, False}, "both kinds must have had their rounds"


def test_a_parameter_is_averaged_over_those_that_hold_it() -> None:
    """Weights .1 .2 .3 .4 at shares 1, ½, ¼, ¼, by hand; and a level of weight 0 counts for nothing."""
    federation = classes()
    plan = ClientPlan.of(wide_net(), make("heterofl", widths=(1.0, 0.5, 0.25)), federation.train, LOCAL)
    indices = [level.submodel.param_index for level in plan.levels if level.submodel is not None]
    size = plan.layout.size
    sums = [torch.full((len(index),), total) for index, total in zip(indices, (1.0, 3.0, 5.0), strict=True)]
    mean = mean_over_holders(indices, sums, (0.1, 0.2, 0.7), torch.zeros(size))
    expected = np.full(size, 1 / 0.1)
    expected[places(2)] = (1 + 3) / (0.1 + 0.2)
    expected[places(1)] = 1 + 3 + 5
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    received = torch.full((size,), 3.0)
    alone = mean_over_holders(indices, [None, None, torch.ones(len(indices[2]))], (0.0, 0.0, 0.7), received)
    assert (np.delete(alone.numpy(), places(1)) == 3).all()
    np.testing.assert_allclose(alone[indices[2]], 1 / 0.7, rtol=1e-6)


def test_mixing_by_samples_weighs_each_region_by_its_own_holders() -> None:
    """Another policy than equal weights, one step from the start: against the mean of the clients' own models."""
    one_step = Local(steps=1, batch_size=0, lr=0.3)
    by_samples = Method("by samples", (CrossEntropy(),), personal=EarlyExitSlice())
    model = theta(go(by_samples, local=one_step, rounds=1))
    alone = {}
    for i in range(6):
        single_kind = Method("one", (CrossEntropy(),), personal=EarlyExitSlice(float(is_simple(i, 0.5))))
        alone[i] = theta(go(single_kind, federation=of_kind(classes(), [i]), local=one_step, rounds=1))
    n = np.array(SIZES, dtype=float)
    everyone = sum(n[i] * alone[i][M] for i in range(6)) / n.sum()
    large = sum(n[i] * alone[i][REST] for i in (0, 2, 4)) / n[[0, 2, 4]].sum()
    np.testing.assert_allclose(model[M], everyone, rtol=0, atol=1e-12)
    np.testing.assert_allclose(model[REST], large, rtol=0, atol=1e-12)


def test_what_is_equal_at_all_holders_stays_as_it_is() -> None:
    """Counters and masks keep their bits; what differs within a level or between levels is averaged."""
    clients = [(0, 0.1, [3.0, 2.0, 4.0, -torch.inf]), (0, 0.2, [3.0, 2.0, 6.0, -torch.inf]), (1, 0.4, [3.0, 5.0])]
    totals = [Fold(), Fold()]
    for level, weight, values in clients:
        value, sums = torch.tensor(values), totals[level].sums
        sums[BUFFERS] = sums.get(BUFFERS, torch.zeros(len(values))) + weight * value
        sums[EQUAL] = agreement(sums.get(EQUAL, value), value)
    places, received = [torch.tensor([0, 1, 3, 4]), torch.tensor([0, 1])], torch.tensor([9.0, 9.0, 8.0, 9.0, 9.0])
    buffers = buffers_over_holders(places, totals, (0.1 + 0.2, 0.4), received)
    assert (buffers[[0, 2, 4]]).tolist() == [3.0, 8.0, -torch.inf]
    np.testing.assert_allclose(buffers[[1, 3]], [(0.3 * 2 + 0.4 * 5) / 0.7, (0.1 * 4 + 0.2 * 6) / 0.3], rtol=1e-6)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_batch_statistics_are_averaged_over_those_that_hold_them(fraction: float) -> None:
    """One step from the start: those before the exit over all clients, the others over complex ones."""
    net, train = normed_ends(), classes().train
    (w1, b1), (w2, b2) = (
        [p.detach().double().numpy() for p in net.get_submodule(f"body.{name}.0").parameters()]
        for name in ("near", "far")
    )
    near = [np.tanh(train.client(i).x.numpy() @ w1.T + b1) for i in range(6)]
    far = [np.tanh((a - a.mean(0)) / np.sqrt(a.var(0) + 1e-5) @ w2.T + b2) for a in near]
    by_samples = Method("by samples", (CrossEntropy(),), personal=EarlyExitSlice(fraction))
    one_step = Local(steps=1, batch_size=0, lr=0.3)
    buffers = go(by_samples, model=normed_ends, local=one_step, rounds=1).snapshot.server.buffers.numpy()
    mean, var, count, far_mean, far_var, far_count = np.split(buffers, np.cumsum([NEAR, NEAR, 1, FAR, FAR]))

    def averaged(values: list[np.ndarray], clients: tuple[int, ...]) -> np.ndarray:
        return np.average([values[i] for i in clients], axis=0, weights=[SIZES[i] for i in clients])

    everyone, complex = tuple(range(6)), (0, 2, 4)
    np.testing.assert_allclose(mean, 0.1 * averaged([a.mean(0) for a in near], everyone), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        var, 0.9 + 0.1 * averaged([a.var(0, ddof=1) for a in near], everyone), rtol=0, atol=1e-12
    )
    if fraction == 1:
        assert (count, far_count, far_mean.any(), set(far_var)) == (1, 0, False, {1})
    else:
        assert (count, far_count) == (1, 1)
        np.testing.assert_allclose(far_mean, 0.1 * averaged([z.mean(0) for z in far], complex), rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            far_var, 0.9 + 0.1 * averaged([z.var(0, ddof=1) for z in far], complex), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    ("name", "settings", "sizes"),
    [
        ("fedhen", {}, [44, 27]),
        ("noside", {}, [44, 27]),
        ("decouple", {}, [32, 27]),  # the complex net has no exit
        ("heterofl", {"widths": (1.0, 0.5, 0.25)}, [35, 19, 11]),
    ],
)
@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_client_receives_and_sends_what_it_holds(
    name: str, settings: dict[str, Any], sizes: list[int], engine: str
) -> None:
    record = go(method(name, **settings), local=LOCAL, rounds=1, engine=engine).history[0]
    expected = sum(sizes[i % len(sizes)] for i in range(6))
    assert record["comm/up_params"] == record["comm/down_params"] == expected
    assert record["comm/bytes"] == 2 * 8 * expected


def second(plan: ClientPlan) -> tuple[ClientPlan, Tensor]:
    """The plan of the less capable level, and where its parameters lie."""
    level = plan.levels[1]
    assert level.submodel is not None
    return level, level.submodel.param_index


def masked(net: nn.Module, index: Tensor) -> nn.Module:
    """The net with all parameters at zero but those of the given places."""
    plan = ClientPlan.of(net, AVERAGED, classes().train, LOCAL)
    parameters = torch.zeros_like(plan.theta0)
    parameters[index] = plan.theta0[index]
    plan.layout.write(net, parameters, plan.buffers0)
    return net


@pytest.mark.parametrize(
    ("make_net", "inputs"),
    [
        (lambda: tanh_net(8), (4,)),
        (images(), IMAGE),
        (images("group"), IMAGE),
        (lambda: models.make("two_nn", classes=3, inputs=(4,), width=8), (4,)),
        (lambda: models.make("fedssa_cnn", classes=3, inputs=(2, 8, 8), channels=(4, 8), padding="same"), (2, 8, 8)),
        (lambda: models.make("resnet10_s", classes=3, inputs=(2, 8, 8), groups=2), (2, 8, 8)),
        (lambda: models.make("wide_resnet", classes=3, inputs=(2, 8, 8), depth=10, width=1), (2, 8, 8)),
        (lambda: models.make("mobilenet", classes=3, inputs=(2, 8, 8), width=0.25), (2, 8, 8)),
    ],
)
def test_a_narrow_net_is_the_whole_one_with_zeros(make_net: Any, inputs: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = make_net().double()
    plan = ClientPlan.of(net, make("heterofl"), classes().train, LOCAL)
    half, index = second(plan)
    x = torch.randn(5, *inputs, dtype=torch.float64)
    small = half.model.eval()(x)
    assert 0 < len(index) < 0.6 * plan.layout.size
    torch.testing.assert_close(small, masked(net, index).eval()(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make_net", [lambda: tanh_net(8), images(), images("group")])
def test_the_scaler_acts_in_training_on_hidden_layers_alone(make_net: Any) -> None:
    """The same parameters, and the same net when it is tested; in training 1/r times what hidden layers say."""
    net = make_net().double()
    plain, scaled = narrowed(net, 0.5), narrowed(net, 0.5, scale=True)
    for a, b in zip(plain.named_parameters(), scaled.named_parameters(), strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
    outputs: dict[str, Tensor] = {}
    for name, part in scaled.named_modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            part.register_forward_hook(lambda module, inputs, out, name=name: outputs.update({name: out}))
    flat_inputs = isinstance(plain.get_submodule("body.0"), nn.Linear)
    x = torch.randn(5, *((4,) if flat_inputs else IMAGE), dtype=torch.float64)
    torch.testing.assert_close(scaled.eval()(x), plain.eval()(x), rtol=0, atol=0)
    first = outputs["body.0"]
    scaled.train()(x)
    torch.testing.assert_close(outputs["body.0"], 2 * first)
    head = scaled.get_submodule("head")
    with torch.no_grad():
        again = nn.functional.linear(scaled.get_submodule("body")(x), head.weight, head.bias)  # type: ignore[arg-type]
    torch.testing.assert_close(outputs["head"], again)
    top = WidthSlice((1.0, 0.5), scale=True).network(net, 0)
    assert not any(part._forward_hooks for part in top.modules())


def test_the_places_of_a_narrow_net_are_where_its_numbers_came_from() -> None:
    """Channels-last kernels included, whose order in the flat vector is another one."""
    net = images("group")()
    plan = ClientPlan.of(net, make("heterofl"), classes().train, LOCAL)
    for level in plan.levels:
        assert level.submodel is not None
        index = level.submodel.param_index
        torch.testing.assert_close(level.layout.read(level.model)[0], plan.theta0[index])
        assert len(index.unique()) == len(index)


def test_the_nested_networks_of_the_zoo() -> None:
    """PreActResNet-18 has the thesis' 0.7 million parameters in M, and its simple clients train the small network."""
    net = models.make("preact_resnet18", classes=10, inputs=(3, 32, 32), exit=True)
    plan = ClientPlan.of(net, make("fedhen"), classes().train, LOCAL)
    simple, index = second(plan)
    assert (plan.levels[0].layout.size, len(index)) == (plan.layout.size, 676_171)
    small = models.make("preact_exit18", classes=10, inputs=(3, 32, 32))
    small.load_state_dict(simple.model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert isinstance(net, EarlyExit)
        assert isinstance(simple.model, Simple)
        torch.testing.assert_close(small(x), net.ends(x)[0])
        torch.testing.assert_close(simple.model.head(simple.model.features(x)), small(x))


@pytest.mark.parametrize("name", NESTED)
def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    on = Evaluation(what=("global", "clients", "average"))
    setup = experiment(name, local=LOCAL, cohort=3, rounds=6, evaluation=on, drop_rate=0.2)
    full_run = run(setup, tmp_path / "full", checkpoint_every=2)
    run(replace(setup, rounds=3), tmp_path / "cut", checkpoint_every=2)
    again = run(setup, tmp_path / "cut", resume=True, checkpoint_every=2)
    assert_same_run(full_run, again)


@pytest.mark.parametrize("name", NESTED)
def test_every_level_is_measured(name: str) -> None:
    on = Evaluation(what=("global", "clients", "average"))
    result = go(name, local=LOCAL, rounds=2, cohort=4, evaluation=on)
    record, server = result.history[-1], result.snapshot.server.theta
    setup = experiment(name)
    plan = ClientPlan.of(setup.model().double(), setup.method, setup.federation.train, LOCAL)
    (level, index), x, y = second(plan), setup.federation.test.x, setup.federation.test.y
    layout, names = level.layout, setup.method.personal.levels

    def loss(theta: Tensor) -> float:
        layout.write(level.model, theta, torch.zeros(0, dtype=theta.dtype))
        with torch.no_grad():
            return float(nn.functional.cross_entropy(level.model(x), y))

    assert record[f"global/{names[1]}/loss"] == pytest.approx(loss(server[index]), abs=1e-12)
    assert record["global/loss"] != record[f"global/{names[1]}/loss"]
    last = result.snapshot.last
    assert last is not None
    simple_models = [last.get(i) for i in (1, 3, 5)]
    assert record[f"average/{names[1]}/loss"] == pytest.approx(loss(torch.stack(simple_models).mean(0)), abs=1e-12)
    assert record["clients/accuracy/clients"] == 6
    assert record[f"clients/{names[1]}/accuracy/clients"] == 3
    assert record[f"clients/{names[0]}/accuracy/clients"] == 3
    means = [record[f"clients/{name}/accuracy/mean"] for name in names]
    assert record["clients/accuracy/mean"] == pytest.approx(np.mean(means))
    samples = setup.federation.held_out.client(3)  # of the smaller network, whose model is the server's part of it
    layout.write(level.model, server[index], torch.zeros(0, dtype=server.dtype))
    with torch.no_grad():
        right = (level.model(samples.x).argmax(1) == samples.y).double().mean()
    evaluator = Evaluator(plan, setup.federation, Evaluation(what=("clients",)))
    snapshot, clients = result.snapshot, np.array([0, 3])
    used = evaluator.uses(snapshot.server, snapshot.store, clients)
    split = evaluator.federation.held_out
    (values,) = evaluator.predictions(split, snapshot.server, snapshot.store, clients, [used])
    assert values.by_group("accuracy", split.index.pick(clients).offsets)[1] == pytest.approx(float(right))


def test_a_level_without_clients_has_no_average() -> None:
    result = go(method("fedhen", simple_fraction=0.0), rounds=1, evaluation=Evaluation(what=("average", "global")))
    assert "average/loss" in result.history[0]
    assert "average/simple/loss" not in result.history[0]
    assert "global/simple/loss" in result.history[0]


def test_levels_go_with_terms_mixing_and_server_optimisers() -> None:
    """FedProx's term, AAggFF's coefficients and Adam at the server, on all engines."""
    terms, mixing = (CrossEntropy(), Proximal(0.5)), make("aaggff_d").mixing
    composition = Method("mixed", terms, personal=EarlyExitSlice(), mixing=mixing, server=Adam(0.05))
    runs = {e: go(composition, local=LOCAL, cohort=4, engine=e) for e in ("serial", "processes")}
    assert_same_run(runs["serial"], runs["processes"])
    plain = theta(go("fedhen", local=LOCAL, cohort=4))
    assert np.abs(theta(runs["serial"]) - plain).max() > 1e-3


def test_a_share_of_all_clients_is_simple() -> None:
    for share in (0.0, 0.1, 0.3, 0.5, 2 / 3, 0.9, 1.0):
        for clients in (1, 7, 10, 100, 1000):
            simple = sum(is_simple(i, share) for i in range(clients))
            assert abs(simple - share * clients) < 1
            assert simple == int(share * clients + 1e-6)


def test_a_quarter_of_the_width_is_a_half_of_a_half() -> None:
    net = tanh_net(8)
    twice = narrowed(narrowed(net, 0.5), 0.5)
    for once, again in zip(narrowed(net, 0.25).parameters(), twice.parameters(), strict=True):
        assert torch.equal(once, again)


def test_a_normalisation_without_parameters_is_cut_as_well() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(2, 8, affine=False), nn.Linear(8, 2)).double()
    x, half = torch.randn(5, 3, dtype=torch.float64), narrowed(net, 0.5)
    with torch.no_grad():
        hidden = nn.functional.group_norm(net[0](x)[:, :4], 1)
        assert torch.allclose(half(x), nn.functional.linear(hidden, net[2].weight[:, :4], net[2].bias))


@pytest.mark.exhaustive
def test_on_real_digits_the_side_objective_helps_the_simple_model() -> None:
    """Two digits a client: FedHeN's simple model learns from all ten clients, Decouple's from half of them."""
    federation = federate("digits", Pathological(classes=2), clients=10, seed=0)
    accuracy = {}
    for name in ("fedhen", "decouple"):
        setup = experiment(
            name,
            federation=federation,
            model=lambda: models.make("exit_cnn", classes=10, inputs=(1, 8, 8), channels=(8, 16, 16)),
            rounds=20,
            local=Local(epochs=1, batch_size=20, lr=0.1, clip=10),
            evaluation=Evaluation(what=("global",), every=20),
            dtype="float32",
        )
        accuracy[name] = run(setup).history[-1]["global/simple/accuracy"]
    assert accuracy["fedhen"] > accuracy["decouple"]
    assert accuracy["fedhen"] > 0.4
