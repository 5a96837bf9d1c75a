"""Which optimiser is followed, and what is said when no attached one steps while the weights change."""

import warnings
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from maxgain import Lipschitz, MaxGain, MaxNorm, measure_gains
from maxgain.errors import AttachError, MeasurementWarning
from maxgain.observe import UPDATES_UNTIL_NOTICED

GAMMA = 0.2


class SAM(torch.optim.Optimizer):
    """As it is commonly written: ``second_step`` steps a base optimiser that has the same parameter groups."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class ScheduleFree(torch.optim.Optimizer):
    """As it is commonly written: forwards see y, the state has z, and x for evaluation is what y and z imply."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            weight = 1 / group["k"]
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, weight).add_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(y.grad, alpha=group["lr"])
        self.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        for group in self.param_groups:
            for y in group["params"]:
                y.lerp_(self.state[y]["z"], 1 - 1 / group["beta"])


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def assert_bounded(model: nn.Module, constraint: MaxGain) -> None:
    """Within a margin for other batches; without a constraint the gains are near 0.6."""
    model(torch.randn(8, 6))
    assert all(gain < 1.5 * GAMMA for gain in constraint.gains.values())


def backward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(8, 6)).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("trunk", ["frozen", "held by neither", "held by both"])
def test_promise_10_two_optimisers_project_whoever_holds_the_layer_before_theirs(trunk: str, every: int) -> None:
    model = nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in ("trunk", "one", "other")})
    model["trunk"].requires_grad_(trunk != "frozen")
    shared = [] if trunk == "held by neither" else [model["trunk"].weight]
    optimisers = [torch.optim.SGD([*shared, model[name].weight], lr=0.0) for name in ("one", "other")]
    constraint = MaxGain(model, 0.1, every=every)
    for optimiser in optimisers:
        constraint.attach(optimiser)
    before = {name: layer.weight.detach().clone() for name, layer in model.items()}
    x = torch.randn(8, 6)
    for _ in range(2 * every):
        for optimiser in optimisers:
            model["other"](model["one"](model["trunk"](x))).sum().backward()
            optimiser.step()
    changed = {name for name, layer in model.items() if not torch.equal(layer.weight, before[name])}
    assert changed == {"one", "other"} | ({"trunk"} if trunk == "held by both" else set())


def test_an_optimiser_that_is_given_other_weights_projects_those() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    optimiser = torch.optim.SGD([model[0].weight], lr=0.0)
    constraint = MaxGain(model, 0.1).attach(optimiser)
    backward(model)
    optimiser.step()
    optimiser.param_groups[0]["params"] = [model[1].weight]
    backward(model)
    optimiser.step()
    backward(model)
    assert max(constraint.gains.values()) < 0.2


@pytest.mark.parametrize("by_closure", [False, True])
def test_sam_is_followed_by_its_base_optimiser(by_closure: bool) -> None:
    model = net()
    optimiser = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    constraint = MaxGain(model, GAMMA).attach(optimiser)
    for _ in range(6):
        backward(model)
        if by_closure:
            optimiser.step(lambda: backward(model))
        else:
            optimiser.first_step()
            backward(model)
            optimiser.second_step()
    assert_bounded(model, constraint)
    with pytest.raises(AttachError, match="this SGD is attached to this MaxGain already"):
        constraint.attach(optimiser.base_optimizer)


def test_a_schedule_free_optimiser_is_bounded_where_its_own_weights_are_scaled_along() -> None:
    def trained(*, along: bool) -> tuple[float, float]:
        torch.manual_seed(0)
        model, inputs, labels = net(), torch.randn(64, 6), torch.randint(3, (64,))
        optimiser = ScheduleFree(model.parameters(), lr=0.3)
        constraint = MaxGain(model, GAMMA).attach(optimiser)
        for _ in range(200):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimiser.step()
            for name, scale in constraint.scales.items() if along else ():  # as docs/models.md says
                optimiser.state[model.get_submodule(name).weight]["z"].mul_(scale)
        optimiser.evaluate()
        gains = measure_gains(model, [inputs]).gains.values()
        return min(float(gain.max()) for gain in gains), max(float(gain.max()) for gain in gains)

    smallest, largest = trained(along=True)
    assert 0.5 * GAMMA < smallest <= largest < 1.05 * GAMMA
    smallest, _ = trained(along=False)
    assert smallest < 0.5 * GAMMA  # what the page warns of


@pytest.mark.parametrize("before", [True, False])
def test_accelerates_optimiser_is_taken_before_and_after_prepare(before: bool) -> None:
    model = net()
    optimiser: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint = MaxGain(model, GAMMA)
    accelerator = Accelerator(cpu=True)
    if before:
        constraint.attach(optimiser)
    model, optimiser = accelerator.prepare(model, optimiser)
    if not before:
        constraint.attach(optimiser)
    for _ in range(3):
        accelerator.backward(model(torch.randn(8, 6)).square().mean())
        optimiser.step()
        optimiser.zero_grad()
    assert_bounded(model, constraint)


class Wrapper:
    """Somebody's own, that is no torch optimiser but has one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def test_a_wrapper_that_exposes_the_torch_optimiser_is_unwrapped_however_often_it_is_wrapped() -> None:
    model = net()
    optimiser = Wrapper(Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)).optimizer)
    constraint = MaxGain(model, GAMMA).attach(optimiser)  # type: ignore[arg-type]
    backward(model)
    optimiser.step()
    assert_bounded(model, constraint)
    with pytest.raises(AttachError, match="or a wrapper that holds one, not Wrapper"):
        MaxGain(model, GAMMA).attach(Wrapper(None))  # type: ignore[arg-type]


def train_by_another(model: nn.Module, steps: int, *, compiled: bool = False) -> None:
    forward = torch.compile(model, backend="eager") if compiled else model
    other = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        forward(torch.randn(8, 6)).square().mean().backward()
        other.step()


@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, MaxNorm])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimiser_that_steps_without_being_attached_is_noticed(constrain: Any, compiled: bool) -> None:
    torch.compiler.reset()
    model = net()
    constraint = constrain(model, GAMMA).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(MeasurementWarning, match=r"the optimiser that updates them \(Adam does\), or call step\(\)"):
        train_by_another(model, UPDATES_UNTIL_NOTICED, compiled=compiled)
    train_by_another(model, 5)  # said once
    constraint.detach()


@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, MaxNorm])
def test_a_constraint_that_nobody_attached_is_noticed(constrain: Any) -> None:
    model = net()
    constraint = constrain(model, GAMMA)
    with pytest.warns(MeasurementWarning, match=r"'0', '2'.*\(Adam\) that is not attached.*: call attach\(optimizer\)"):
        train_by_another(model, UPDATES_UNTIL_NOTICED)
    train_by_another(model, 5)  # said once
    constraint.detach()


def test_nobody_need_attach_who_only_measures_or_steps_by_hand() -> None:
    model = net()
    measuring, by_hand = MaxGain(model, float("inf")), MaxGain(model, GAMMA)
    for _ in range(UPDATES_UNTIL_NOTICED + 1):
        train_by_another(model, 1)
        by_hand.step()
    assert max(measuring.gains.values()) > 0


def in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad


def by_its_data(parameter: nn.Parameter) -> None:
    parameter.data.sub_(0.1 * parameter.grad)


def with_other_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data - 0.1 * parameter.grad


@pytest.mark.parametrize("update", [in_place, by_its_data, with_other_data])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_updated_by_hand_while_nothing_steps_are_noticed(update: Any, frozen: bool) -> None:
    model = net()
    next(iter(model.children())).requires_grad_(not frozen)
    MaxGain(model, GAMMA).attach(torch.optim.SGD(model.parameters(), lr=0.1))

    def train(steps: int) -> None:
        for _ in range(steps):
            backward(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    update(parameter)

    with pytest.warns(MeasurementWarning, match="no optimiser that is attached to this MaxGain steps"):
        train(UPDATES_UNTIL_NOTICED + 1)
    train(5)


def test_what_is_meant_is_not_noticed() -> None:
    model, other = net(), net()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint = MaxGain(model, GAMMA).attach(optimiser)
    train_by_another(other, 8)  # another model's
    for _ in range(12):
        backward(model)  # gradient accumulation
    optimiser.step()
    with constraint.paused():
        train_by_another(model, 8)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=12)
    constraint.detach()
    constraint.attach(lbfgs)
    lbfgs.step(lambda: backward(model))  # many updates within a step
    constraint.detach()
    train_by_another(model, 8)
    model.eval()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)


@pytest.mark.parametrize("constrain", [MaxGain, Lipschitz, MaxNorm])
def test_the_second_of_two_optimisers_is_noticed_if_the_first_alone_is_attached(constrain: Any) -> None:
    model = net()
    optimisers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())]
    constrain(model, GAMMA).attach(optimisers[0])

    def train(steps: int) -> None:
        for _ in range(steps):
            backward(model)
            for optimiser in optimisers:
                optimiser.step()

    with pytest.warns(
        MeasurementWarning, match=r"these layers to their bounds: '2'. They are updated by an optimiser \(Adam\)"
    ) as said:
        train(UPDATES_UNTIL_NOTICED + 5)
    assert len(said) == 1


def test_a_second_optimiser_of_layers_that_have_no_bound_need_not_be_attached() -> None:
    model = net()
    optimisers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    MaxGain(model, {"0": GAMMA, "2": float("inf")}).attach(optimisers[0])
    for _ in range(UPDATES_UNTIL_NOTICED + 1):
        backward(model)
        for optimiser in optimisers:
            optimiser.step()


class Unfinished(torch.optim.Optimizer):
    """Whose author forgot to call ``super().__init__``."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]


def test_an_optimiser_without_hooks_is_refused_with_what_to_do() -> None:
    model = net()
    with pytest.raises(AttachError, match=r"this Unfinished was made without .* call super\(\).__init__"):
        MaxGain(model, GAMMA).attach(Unfinished(model.parameters()))


class Growing(torch.optim.SGD):
    """Does something to the weights after the step of its base class."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(3)


@pytest.mark.parametrize("every", [1, 2])
def test_an_optimiser_that_calls_the_step_of_its_base_class_projects_once_and_last(every: int) -> None:
    model, x = net(), torch.randn(8, 6)
    torch.optim.SGD(model.parameters())  # from now on torch calls hooks after the step of the base class too
    optimiser = Growing(model.parameters(), lr=0.0)
    constraint = MaxGain(model, GAMMA, measure="fresh", every=every).attach(optimiser)
    for step in range(4):
        model(x).sum().backward()
        optimiser.step()
        largest = max(float(gains.max()) for gains in measure_gains(model, [x]).gains.values())
        assert largest == pytest.approx(GAMMA if step % every == 0 else 3 * GAMMA, rel=1e-4)
    assert set(constraint.scales.values()) != {1.0}


def test_an_optimisers_only_layer_need_not_run_in_its_first_step() -> None:
    model = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("always", "sometimes")})
    optimisers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.values()]
    constraint = MaxGain(model, GAMMA)
    for optimiser in optimisers:
        constraint.attach(optimiser)
    model["always"](torch.randn(8, 6)).sum().backward()
    optimisers[0].step()
    with pytest.warns(
        MeasurementWarning, match="not measured by the first step, so not constrained in it: 'sometimes'"
    ):
        optimisers[1].step()


def test_a_constraint_that_is_gone_hears_nothing() -> None:
    model = net()
    MaxGain(model, GAMMA).attach(torch.optim.SGD(model.parameters(), lr=0.1)).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_by_another(model, 8)


def test_a_model_that_was_changed_behind_a_constraint_disturbs_no_other_training() -> None:
    changed = nn.Linear(2, 2)
    constraint = MaxGain(changed)
    del changed.weight
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    assert not hasattr(constraint.model, "weight")


def test_fresh_inputs_do_not_pile_up() -> None:
    model = net()
    constraint = MaxGain(model, GAMMA, measure="fresh")
    kept = constraint._maxima
    largest = 0.0
    for i in range(200):
        x = torch.randn(8, 6)
        with torch.no_grad():
            model(x)
        largest = max(largest, float((x @ model[0].weight.detach().T).norm(dim=1).div(x.norm(dim=1)).max()))
        assert all(observer.kept_count <= min(i + 1, 64) for observer in kept)
    constraint.step()
    assert constraint.gains["0"] == pytest.approx(largest, rel=1e-5)
    assert all(observer.kept.before is None for observer in kept)
