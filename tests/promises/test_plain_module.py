"""Promise 12: the model stays a plain module, which copies, saves, exports, traces and is transformed as one."""

import copy
import io
import math
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from maxgain import MaxGain
from maxgain.errors import MaxGainError
from nets import conv_net, frozen_sgd, images, mlp, rows, sgd, train
from odd_layers import Scaled

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def test_promise_12_the_state_dict_and_the_list_of_modules_stay_as_they_were() -> None:
    plain, model = conv_net(), conv_net()
    MaxGain(model).attach(sgd(model))
    model(images())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


WITHOUT_MAXGAIN = """
import pickle, sys
sys.modules["maxgain"] = None  # importing it fails
model = pickle.load(sys.stdin.buffer)
import torch
model(torch.ones(2, 3, 6, 6)).sum().backward()
"""


def test_promise_12_a_pickled_model_needs_no_maxgain() -> None:
    model = conv_net()
    MaxGain(model).attach(sgd(model))
    model(images())
    text = pickle.dumps(model)
    names = [str(argument) for _, argument, _ in pickletools.genops(text) if isinstance(argument, str)]
    assert not any("maxgain" in name for name in names)
    done = subprocess.run([sys.executable, "-c", WITHOUT_MAXGAIN], input=text, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_promise_12_assigned_weights_are_the_ones_that_are_projected(dtype: torch.dtype) -> None:
    model = conv_net()
    constraint = MaxGain(model, 0.1)
    state = {key: 3 * value.to(dtype) if "num" not in key else value for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    optimizer = frozen_sgd(model)
    constraint.attach(optimizer)
    before = model[0].weight.detach().clone()
    train(model, optimizer, [images().to(dtype)])
    assert constraint.gains["0"] > 0.1
    torch.testing.assert_close(model[0].weight.detach(), before * (0.1 / constraint.gains["0"]))


def test_promise_12_a_model_may_be_given_its_memory_after_the_constraint_was_made() -> None:
    with torch.device("meta"):
        model = mlp()
    constraint = MaxGain(model, 0.1)
    model(rows().to("meta"))  # for its shapes, which shows no gain
    model.to_empty(device="cpu")
    model.load_state_dict(mlp().state_dict())
    optimizer = sgd(model)
    constraint.attach(optimizer)
    train(model, optimizer, [rows()])
    assert all(scale < 1 for scale in constraint.scales.values())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_promise_12_the_exported_program_is_the_plain_models(strict: bool, training: bool) -> None:
    plain, model = conv_net().train(training), conv_net().train(training)
    constraint = MaxGain(model)
    programs = [torch.export.export(one, (images(),), strict=strict) for one in (plain, model)]
    expected, nodes = (
        [str(node.target) for node in program.graph.nodes if node.op == "call_function"] for program in programs
    )
    assert nodes == expected
    assert list(programs[1].state_dict) == list(programs[0].state_dict)
    torch.export.save(programs[1], io.BytesIO())
    constraint.step()
    assert all(gain != gain for gain in constraint.gains.values()), "exporting is not training"


# --- Transforms and traces --------------------------------------------------------------------------------------------

X = rows(0, 4)


def loss(model: nn.Module, parameters: Any, x: Tensor) -> Tensor:
    out: Tensor = functional_call(model, parameters, (x,))
    return out.square().mean()


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def on_meta(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.to("meta") for name, parameter in model.named_parameters()}


def fake_shape(model: nn.Module) -> tuple[int, ...]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return tuple(model(X).shape)


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: grad(lambda p: loss(m, p, X))(detached(m)),
    "per-sample gradients": lambda m: vmap(grad(lambda p, x: loss(m, p, x[None])), (None, 0))(detached(m), X),
    "vmap": lambda m: vmap(m)(X),
    "jacrev": lambda m: jacrev(m)(X[0]),
    "hessian": lambda m: hessian(lambda x: m(x).sum())(X[0]),
    "jvp": lambda m: jvp(m, (X,), (X,)),
    "make_fx": lambda m: make_fx(m)(X)(X),
    "aot_module": lambda m: aot_module(m, lambda graph, _: graph)(X),
    "fake tensors": fake_shape,
    "the meta device": lambda m: tuple(functional_call(m, on_meta(m), X.to("meta")).shape),
    "jit.trace": lambda m: torch.jit.trace(m, X)(X),
    "export": lambda m: torch.export.export(m, (X,)).module()(X),
    "symbolic trace": lambda m: torch.fx.symbolic_trace(m)(X),
}  # fmt: skip


def flat(value: Any) -> list[Tensor]:
    return [torch.as_tensor(leaf) for leaf in torch.utils._pytree.tree_flatten(value)[0]]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_promise_12_a_transform_of_a_watched_model_is_that_of_the_plain_one(name: str) -> None:
    expected, model = TRANSFORMS[name](mlp()), mlp()
    constraint = MaxGain(model, math.inf)
    torch.testing.assert_close(flat(TRANSFORMS[name](model)), flat(expected))
    model(X).square().mean().backward()
    constraint.step()
    assert all(gain > 0 for gain in constraint.gains.values()), "and afterwards it measures as before"


@pytest.mark.parametrize("name", ["grad", "per-sample gradients", "vmap", "jacrev", "jvp"])
def test_promise_12_nor_is_anything_measured_where_a_transform_is_compiled(name: str) -> None:
    torch.compiler.reset()
    model = mlp()
    constraint = MaxGain(model, math.inf)
    result = torch.compile(lambda: TRANSFORMS[name](model), fullgraph=True, backend="eager")()
    torch.testing.assert_close(flat(result), flat(TRANSFORMS[name](mlp())))
    constraint.step()
    assert all(math.isnan(gain) for gain in constraint.gains.values())


def test_promise_12_a_watched_layer_with_a_forward_of_its_own_is_traced_as_a_plain_one() -> None:
    model = nn.Sequential(Scaled(6, 4))
    MaxGain(model, 0.5)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(X), model(X))
    assert torch.equal(vmap(copy.deepcopy(model))(X), vmap(model)(X))


def test_a_model_that_is_watched_cannot_be_scripted_and_says_so() -> None:
    model = mlp()
    constraint = MaxGain(model)
    with pytest.raises(MaxGainError, match=r"call detach\(\)"):
        torch.jit.script(model)
    constraint.detach()
    torch.jit.script(model)
