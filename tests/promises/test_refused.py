"""Promise 11: what cannot be measured is refused by name, and what was not measured is named."""

import ast
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from maxgain import MaxGain, layers
from maxgain.errors import MeasurementWarning, NotMeasuredError, UnsupportedLayerError


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this is to move to torchao
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})[0]


def int8_linear() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    return layer


def legacy(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still in many models
            return wrap(nn.Linear(4, 4))

    return make


INSIDE, COMPUTED = "inside one fused operation", "is not a parameter but computed from others"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "attention": (lambda: nn.MultiheadAttention(4, 2), "MultiheadAttention", INSIDE),
    "attention's own projection": (
        lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4),
        "NonDynamicallyQuantizableLinear",
        INSIDE,
    ),
    "lstm": (lambda: nn.LSTM(4, 4), "LSTM", INSIDE),
    "gru": (lambda: nn.GRU(4, 4), "GRU", INSIDE),
    "rnn": (lambda: nn.RNN(4, 4), "RNN", INSIDE),
    "lstm cell": (lambda: nn.LSTMCell(4, 4), "LSTMCell", INSIDE),
    "gru cell": (lambda: nn.GRUCell(4, 4), "GRUCell", INSIDE),
    "rnn cell": (lambda: nn.RNNCell(4, 4), "RNNCell", INSIDE),
    "bilinear": (lambda: nn.Bilinear(4, 4, 4), "Bilinear", "linear in each of two inputs"),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "ParametrizedLinear", COMPUTED),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)), "ParametrizedConv2d", COMPUTED),
    "legacy weight norm": (legacy(nn.utils.weight_norm), "Linear", COMPUTED),
    "legacy spectral norm": (legacy(nn.utils.spectral_norm), "Linear", COMPUTED),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), "Linear", COMPUTED),
    "empty": (legacy(lambda _: nn.Linear(4, 0)), "Linear", "its weight has no entries"),
    "lazy": (lambda: nn.LazyLinear(4), "LazyLinear", "run one first"),
    "quantised": (quantised, "Linear", "its weight is quantised"),
    "int8": (int8_linear, "Linear", "its weight is quantised"),
    "float8": (lambda: nn.Linear(4, 4).to(torch.float8_e4m3fn), "Linear", "its weight is quantised to torch.float8"),
    "batch norm without scale": (lambda: nn.BatchNorm1d(4, affine=False), "BatchNorm1d", "no weight to scale"),
    "batch norm without statistics": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        "BatchNorm1d",
        "no running variance",
    ),
}


def test_promise_11_every_refused_type_is_tried() -> None:
    tried = {cls for make, *_ in REFUSED.values() for cls in type(make()).__mro__}
    assert set(layers.REFUSED) <= tried


@pytest.mark.parametrize(("make", "type_name", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_promise_11_what_cannot_be_measured_is_refused_by_name_and_the_remedy_helps(
    make: Callable[[], nn.Module], type_name: str, reason: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"core": make(), "core2": nn.Linear(4, 4)}))
    with pytest.raises(UnsupportedLayerError) as refusal:
        MaxGain(model)
    said = re.fullmatch(
        rf"layer '1\.core' \({type_name}\) cannot be constrained: (.*)\. Leave it out with exclude='(.*)'\.",
        str(refusal.value),
    )
    assert said, str(refusal.value)
    assert reason in said[1]
    assert list(MaxGain(model, exclude=said[2]).bounds) == ["0", "1.core2"], "and nothing else is left out"


def test_promise_11_all_refused_layers_are_named_at_once_and_the_remedy_covers_them() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
    with pytest.raises(UnsupportedLayerError) as refusal:
        MaxGain(model)
    remedy = re.search(r"exclude=(\[.*\])", str(refusal.value))
    assert remedy, str(refusal.value)
    left = MaxGain(model, exclude=ast.literal_eval(remedy[1])).bounds
    assert list(left) == [f"layers.{i}.linear{j}" for i in range(3) for j in (1, 2)]


def sparse() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse())
    return layer


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 4), lambda: nn.Linear(4, 4, dtype=torch.complex64), sparse])
def test_promise_11_a_model_that_is_such_a_layer_is_refused_without_a_remedy(make: Callable[[], nn.Module]) -> None:
    model = make()
    with pytest.raises(UnsupportedLayerError) as refusal:
        MaxGain(model)
    assert str(refusal.value).startswith(f"the model itself ({type(model).__name__}) cannot be constrained: ")
    assert "exclude" not in str(refusal.value)


def test_promise_11_a_layer_that_recorded_nothing_by_the_first_step_is_named() -> None:
    class HalfUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    model = HalfUsed()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    MaxGain(model).attach(optimiser)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.warns(MeasurementWarning, match="not measured by the first step.*: 'unused'"):
        optimiser.step()
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()  # said once


def test_promise_11_a_model_in_evaluation_mode_is_not_left_unconstrained_in_silence() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    MaxGain(model).attach(optimiser)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(NotMeasuredError, match=r"none of the 3 layers was measured.*training mode") as error:
            optimiser.step()
        assert "compile" not in str(error.value), "a model may be compiled first"
    model.train()
    model[1].eval()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.warns(MeasurementWarning, match="not measured by the first step.*: '1'"):
        optimiser.step()


NO_LONGER = {
    "forgotten": "'0' .in evaluation mode., '1' .in evaluation mode.",
    "replaced": ": '1' .replaced.",
    "cleared": ": '1' .its hooks were removed.",
}


@pytest.mark.parametrize("how", NO_LONGER)
def test_promise_11_a_layer_that_is_measured_no_longer_is_named_once(how: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    MaxGain(model).attach(optimiser)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(2, 3)).sum().backward()
            optimiser.step()

    train(5)
    if how == "forgotten":  # after an evaluation
        model.eval()
    elif how == "cleared":  # as those who count operations do
        model[1]._forward_hooks.clear()
    else:  # as those who convert models do, who keep the parameters
        model[1], old = nn.Linear(3, 3), model[1]
        model[1].weight, model[1].bias = old.weight, old.bias
    with pytest.warns(MeasurementWarning, match=f"measured no longer.*{NO_LONGER[how]}") as warned:
        train(120)
    assert len(warned) == 1


def test_promise_11_what_is_evaluated_or_frozen_or_another_optimisers_is_not_named() -> None:
    model = nn.ModuleDict({"trunk": nn.Linear(3, 3), "frozen": nn.Linear(3, 3), "judge": nn.Linear(3, 1)})
    ours = torch.optim.SGD([*model["trunk"].parameters(), *model["frozen"].parameters()], lr=0.01)
    theirs = torch.optim.SGD(model["judge"].parameters(), lr=0.01)
    MaxGain(model).attach(ours).attach(theirs)
    for step in range(20):
        model.train()
        model["judge"](model["frozen"](model["trunk"](torch.randn(2, 3)))).sum().backward()
        theirs.step()
        model["judge"].eval()
        if step == 5:
            model["frozen"].eval().requires_grad_(False)
        ours.step()
        model.eval()
        model["trunk"](torch.randn(2, 3))


def test_promise_11_copies_that_data_parallel_makes_for_other_devices_are_refused() -> None:
    layer = nn.Linear(4, 4)
    constraint = MaxGain(layer)
    # As nn.DataParallel does, which wants two GPUs for it.
    replica: Any = layer._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    replica.weight, replica.bias = layer.weight.detach(), layer.bias.detach()
    with pytest.raises(UnsupportedLayerError, match="DistributedDataParallel"):
        replica(torch.randn(2, 4))
    layer.eval()
    replica.eval()(torch.randn(2, 4))
    assert math.isnan(constraint.gains[""])


def test_promise_11_a_frozen_layer_need_not_be_measured() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].requires_grad_(False).eval()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint = MaxGain(model).attach(optimiser)
    model(torch.ones(2, 3)).sum().backward()
    optimiser.step()
    assert math.isnan(constraint.gains["1"])


def test_promise_11_parameters_without_a_bound_are_listed() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    assert MaxGain(model).unconstrained == ("0.weight", "1.weight", "1.bias", "2.bias")
