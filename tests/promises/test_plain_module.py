"""What promise 12 of the design says of the model: it stays a plain module that copies, saves, loads and exports."""

import copy
import io
import pickle
import pickletools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from maxgain import Lipschitz, MaxGain, MaxNorm, WeightClip
from maxgain.errors import AttachError
from small_net import each_measure


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))


def images(seed: int = 2) -> Tensor:
    return torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def one_step(model: nn.Module, optimiser: torch.optim.Optimizer, seed: int = 2) -> None:
    optimiser.zero_grad()
    model(images(seed)).square().mean().backward()
    optimiser.step()


def equal_states(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_promise_12_the_state_dict_and_the_list_of_modules_stay_as_they_were() -> None:
    plain, model = net(), net()
    MaxGain(model)
    model(images())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


def test_promise_12_a_deep_copy_is_not_watched_and_trains_by_itself() -> None:
    model = net()
    constraint = MaxGain(model, gamma=0.3)
    model(images())
    before = constraint.gains
    twin = copy.deepcopy(model)
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.1)
    one_step(twin, optimiser, seed=3)
    assert constraint.gains == before
    for p, q in zip(twin.parameters(), net().parameters(), strict=True):
        assert p is not q
    unconstrained = net()
    unconstrained(images())  # as the original did, for its running statistics
    one_step(unconstrained, torch.optim.SGD(unconstrained.parameters(), lr=0.1), seed=3)
    assert equal_states(twin, unconstrained)
    own = MaxGain(twin, gamma=0.3).attach(optimiser)
    one_step(twin, optimiser)
    assert any(scale < 1 for scale in own.scales.values())


def test_promise_12_an_averaged_model_can_be_kept_beside_a_constrained_one() -> None:
    model = net()
    average = AveragedModel(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint = MaxGain(model, gamma=0.3).attach(optimiser)
    late_average = AveragedModel(model)
    one_step(model, optimiser)
    gains = constraint.gains
    for kept in (average, late_average):
        kept.update_parameters(model)
        assert kept(images()).shape == (5, 3)
    assert constraint.gains == gains


def test_promise_12_a_copied_constraint_watches_the_copied_model() -> None:
    model = net()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint = MaxGain(
        model, gamma={"0": 0.3, "*": 5.0}, p=3, instance="sample", measure="fresh", exclude="1"
    ).attach(optimiser)
    one_step(model, optimiser)
    for twin in (copy.deepcopy(constraint), pickle.loads(pickle.dumps(constraint))):
        assert twin.model is not model
        assert equal_states(twin.model, model)
        assert twin.bounds == {"0": 0.3, "4": 5.0}
        assert (twin.p, twin.instance, twin.measure) == (3.0, "sample", "fresh")
        assert (twin.gains, twin.scales) == (constraint.gains, constraint.scales)
        own = torch.optim.SGD(twin.model.parameters(), lr=0.1)
        twin.attach(own)
        one_step(twin.model, own, seed=3)
        assert twin.gains != constraint.gains
    one_step(model, optimiser, seed=3)
    assert twin.gains == constraint.gains
    assert equal_states(twin.model, model)


def test_promise_12_model_constraint_and_their_tie_survive_a_common_copy() -> None:
    model = net()
    constraint = MaxGain(model)
    twin, twins_constraint = copy.deepcopy((model, constraint))
    assert twins_constraint.model is twin


WITHOUT_MAXGAIN = """
import pickle, sys
sys.modules["maxgain"] = None  # importing it fails
model = pickle.load(sys.stdin.buffer)
import torch
out = model(torch.ones(2, 3, 6, 6))
out.sum().backward()
assert not any("maxgain" in name for name in sys.modules if sys.modules[name] is not None)
print(type(model).__name__, tuple(out.shape))
"""


def test_promise_12_a_pickled_model_needs_no_maxgain() -> None:
    model = net()
    constraint = MaxGain(model)
    model(images())
    text = pickle.dumps(model)
    names = [str(argument) for _, argument, _ in pickletools.genops(text) if isinstance(argument, str)]
    assert not any("maxgain" in name for name in names)
    done = subprocess.run([sys.executable, "-c", WITHOUT_MAXGAIN], input=text, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == ["Sequential", "(2,", "3)"]
    assert constraint.gains


def test_promise_12_a_saved_model_loads() -> None:
    model = net()
    MaxGain(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert equal_states(torch.load(file, weights_only=False), model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = net()
    plain.load_state_dict(torch.load(file))  # weights_only: nothing but tensors in it
    assert equal_states(plain, model)


@each_measure
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_promise_12_assigned_weights_are_the_ones_that_are_projected(measure: Any, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    constraint = MaxGain(model, gamma=0.2, measure=measure)
    stale_optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint.attach(stale_optimiser)
    state = {key: tensor * 3 if tensor.is_floating_point() else tensor for key, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model(images().to(dtype)).sum().backward()
    with pytest.raises(AttachError, match=r"load_state_dict\(assign=True\)"):
        stale_optimiser.step()

    constraint.detach()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    constraint.attach(optimiser)
    before = model[0].weight.detach().clone()
    model(images().to(dtype)).sum().backward()
    optimiser.step()
    gain = constraint.gains["0"]
    assert gain > 0.2
    torch.testing.assert_close(model[0].weight.detach(), before * (0.2 / gain))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_promise_12_the_exported_program_is_the_plain_models(strict: bool, training: bool) -> None:
    plain, model = net().train(training), net().train(training)
    constraint = MaxGain(model)
    programs = [torch.export.export(m, (images(),), strict=strict) for m in (plain, model)]
    expected, nodes = (
        [str(node.target) for node in program.graph.nodes if node.op == "call_function"] for program in programs
    )
    assert nodes == expected
    expected, names = (list(program.graph_signature.parameters) for program in programs)
    assert names == expected
    assert list(programs[1].state_dict) == list(programs[0].state_dict)
    assert all(gain != gain for gain in constraint.gains.values()), "exporting is not training"
    file = io.BytesIO()
    torch.export.save(programs[1], file)


def test_promise_12_a_model_in_evaluation_mode_can_be_traced() -> None:
    model = net().eval()
    MaxGain(model)
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(images()), model(images()))


class Owner(nn.Module):
    """A model that keeps its own constraint, as a LightningModule may."""

    def __init__(self, constrain: Any = MaxGain) -> None:
        super().__init__()
        self.body = net()
        self.constraint = constrain(self, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, MaxNorm, WeightClip])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, saved_and_loaded, lambda model: AveragedModel(model).module],
    ids=["deepcopy", "save and load", "EMA"],
)
def test_promise_12_a_constraint_may_live_on_the_module_that_it_constrains(copied: Any, constrain: Any) -> None:
    model = Owner(constrain)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    model.constraint.attach(optimiser)
    one_step(model, optimiser)
    twin = copied(model)
    assert twin.constraint is not model.constraint
    assert twin.constraint.model is twin
    assert twin.constraint.gains == model.constraint.gains
    assert twin.constraint.bounds == model.constraint.bounds
    model.constraint.detach()
    for one in (model, twin):
        optimiser = torch.optim.SGD(one.parameters(), lr=0.05)
        one.constraint.attach(optimiser)
        one_step(one, optimiser)
    assert equal_states(model, twin)
    assert twin.constraint.gains == model.constraint.gains
