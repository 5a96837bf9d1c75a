"""Promise 5: norms are taken inside the forward pass, and nothing is kept for them."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from explicit import largest_gain
from maxgain import MaxGain
from promises.common import conv_net


def test_promise_05_an_inplace_relu_that_follows_spoils_nothing() -> None:
    class Net(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.conv, self.norm, self.dense = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 3)
            self.inplace = inplace

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.norm(F.relu(self.conv(x), inplace=self.inplace)), inplace=self.inplace)
            return F.relu(self.dense(x.flatten(1)), inplace=self.inplace)

    gains = []
    for inplace in (False, True):
        model = Net(inplace)
        constraint = MaxGain(model)
        torch.manual_seed(4)
        model(torch.randn(4, 3, 8, 8)).sum().backward()
        gains.append(constraint.gains)
    assert gains[0] == gains[1]


def test_promise_05_hooks_that_change_the_output_come_after_the_measurement() -> None:
    layer = nn.Linear(3, 3, bias=False)
    layer.register_forward_hook(lambda module, args, output: output * 1000)
    x = torch.randn(4, 3)
    constraint = MaxGain(layer)
    out = layer(x)
    assert constraint.gains[""] == pytest.approx(largest_gain(out / 1000, x), rel=1e-5)


def test_promise_05_a_hook_that_is_put_before_ours_later_comes_after_the_measurement_too() -> None:
    layer, x = nn.Linear(6, 5), torch.randn(8, 6)
    constraints = [MaxGain(layer), MaxGain(layer, p=1.0)]
    layer.register_forward_hook(lambda module, args, output: 10 * output, prepend=True)
    for _ in range(2):
        output = layer(x)
        torch.testing.assert_close(output, 10 * nn.functional.linear(x, layer.weight, layer.bias))
        for constraint in constraints:
            explicit = largest_gain(x @ layer.weight.T, x, constraint.p)
            assert constraint.gains[""] == pytest.approx(explicit, rel=1e-5)
            constraint.discard()


def test_promise_05_the_hooks_of_a_module_that_took_the_layers_place_come_after_the_measurement_too() -> None:
    old, new, x = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False), torch.randn(8, 6)
    constraint = MaxGain(old)
    new.weight = old.weight
    new.register_forward_hook(lambda module, args, output: 10 * output)
    for hook in old._forward_hooks.values():  # as torch's quantisation does
        new.register_forward_hook(hook, with_kwargs=True)
    new(x)
    assert constraint.gains[""] == pytest.approx(largest_gain(x @ old.weight.T, x), rel=1e-5)


def test_promise_05_no_activation_is_kept_alive() -> None:
    model = conv_net()
    MaxGain(model)
    storages: list[StorageWeakRef] = []
    for layer in model:
        layer.register_forward_hook(
            lambda module, args, output: storages.extend(StorageWeakRef(t.untyped_storage()) for t in (*args, output))
        )
    with torch.no_grad():  # so that autograd keeps nothing either
        model(torch.randn(4, 3, 8, 8))
    gc.collect()
    assert len(storages) == 2 * len(model)
    assert all(storage.expired() for storage in storages)


def test_promise_05_nothing_more_is_saved_for_the_backward_pass() -> None:
    def saved(constrained: bool) -> list[torch.Size]:
        model = conv_net()
        shapes: list[torch.Size] = []
        if constrained:
            MaxGain(model)

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(4, 3, 8, 8))
        return shapes

    assert saved(constrained=True) == saved(constrained=False) != []
