"""What leans on torch's insides, which its documentation does not promise, and which test guards it.

All of it was seen on torch 2.11 to 2.13, unless it says otherwise. When a new torch breaks one, the named test fails.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from .errors import AttachError, ScriptingError

# --- Optimizers -------------------------------------------------------------------------------------------------------


def parameters_of(optimizer: Optimizer | None) -> set[int]:
    """The identities of the parameters that an optimizer holds."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(parameter) for group in groups for parameter in group["params"]}


def inner_optimizer(optimizer: Any, weights: set[int]) -> Optimizer:
    """Return the torch optimizer that updates the weights: itself, or the one in a wrapper (Accelerate's, SAM)."""
    hooks = "_optimizer_step_post_hooks"
    while not type(optimizer).__module__.startswith("torch.optim."):  # those wrap nothing
        # One that steps itself may leave parts of its steps to others, as ZeroRedundancyOptimizer does.
        held = parameters_of(optimizer) if hasattr(optimizer, hooks) else set()
        parts = [part for part in getattr(optimizer, "__dict__", {}).values() if isinstance(part, Optimizer)]
        inside = {id(part): part for part in parts if parameters_of(part) & weights and parameters_of(part) >= held}
        same = [part for part in inside.values() if part is not optimizer]
        if len(same) != 1:
            break
        optimizer = same[0]
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, hooks):
        raise AttachError(
            f"attach() takes a torch.optim.Optimizer or a wrapper of one, not {type(optimizer).__name__}. "
            "Attach several one by one; without a torch optimizer, call step() after each update."
        )
    return optimizer


UPDATES_UNTIL_SAID = 4
"""How often weights may change without a step of an attached optimizer."""


class Updates:
    """Notices that a constrained weight changes from backward to backward while no attached optimizer steps.

    It is a hook on the gradient of one weight, because compiled forwards call no Python, and holds the constraint
    weakly, because torch holds the hooks of a weight where the garbage collector does not look (test_core).
    """

    def __init__(self, constraint: Any, report: Callable[[Any], None]) -> None:
        self.constraint, self.report = weakref.ref(constraint), report
        self.count, self.steps, self.version, self.is_said = 0, -1, -1, False
        layers = sorted(constraint._slots, key=lambda layer: not constraint._is_bounded[constraint._slots[layer]])
        weights = [layer.parameter for layer in layers if layer.parameter is not None]  # else it is computed now
        usable = [one for one in weights if one.requires_grad and one.is_leaf and not hasattr(type(one), "full_tensor")]
        self.handles = [weight.register_post_accumulate_grad_hook(self) for weight in usable[:1]]

    def __call__(self, weight: Tensor) -> None:
        """Torch calls this after each backward."""
        constraint = self.constraint()
        if constraint is None or constraint._paused:
            return
        steps = 0
        for attached in constraint._attached.values():
            steps += attached.steps
        is_update = self.steps == steps and self.version != weight._version
        self.count = self.count + is_update if self.steps == steps else 0
        self.steps, self.version = steps, weight._version
        if is_update and self.count == UPDATES_UNTIL_SAID and not self.is_said:
            self.is_said = True
            self.report(constraint)

    def remove(self) -> None:
        """Take the hook away again."""
        for handle in self.handles:
            handle.remove()


# --- Hooks ------------------------------------------------------------------------------------------------------------


class ForwardHook:
    """A forward hook that does not travel: a copied or pickled model is a plain module, without our types in it.

    Torch copies and pickles a module's hooks with it (test_plain_module). Before each call of compiled code it checks
    all that hooks read, in every layer: dearest are objects that several layers share and methods of objects without
    slots, so hooks have slots and share few objects.
    """

    __slots__ = ("handle", "module")

    def register(self, module: nn.Module) -> None:
        """Have the hook called after each forward of the module, before all other hooks.

        torch.compile does not check for hooks before it runs what it compiled without them, for this model or for
        another one of the same architecture. It does check the type of a module's dictionary of parameters, so that is
        changed to another type that behaves the same (test_compile).
        """
        self.module = module
        module.__dict__["_parameters"] = OrderedDict(module._parameters)
        self.handle = module.register_forward_hook(self, with_kwargs=True)  # type: ignore[arg-type]
        put_first(module._forward_hooks, self.handle.id)

    def remove(self) -> None:
        """Take the hook away again; the last one of ours leaves the module as it was."""
        self.handle.remove()
        if not any(isinstance(hook, ForwardHook) for hook in self.module._forward_hooks.values()):
            self.module.__dict__["_parameters"] = dict(self.module._parameters)

    @property
    def __name__(self) -> str:
        # torch.jit.script compiles the hooks of a module, and asks for their names first.
        raise ScriptingError("A model cannot be scripted while a constraint watches it: call detach(), then script it.")

    def __reduce__(self) -> tuple[Any, ...]:
        # A callable of the standard library that takes anything and returns None, so it can stand in for a hook.
        return getattr, (contextlib.nullcontext(), "__exit__")


@contextlib.contextmanager
def preserve_rng_and_buffers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a module on the side: its buffers and the random numbers are afterwards as they were.

    The buffers are replaced by copies meanwhile: a change in place, though undone, would upset autograd (test_models).
    """
    buffers = [(part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    try:
        for home, name, buffer in buffers:
            home[name] = None if buffer is None else buffer.clone()
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with torch.random.fork_rng([device] if device.type == "cuda" and not is_captured else []):
            yield
    finally:
        for home, name, buffer in buffers:
            home[name] = buffer


# --- Compiling and capturing ------------------------------------------------------------------------------------------


def put_first(hooks: dict[int, Any], name: int) -> None:
    """Have one of a module's hooks called before the others, which are added again behind it.

    ``prepend=True`` would leave it where it was for the compiler of torch 2.11, which reads an ordered dictionary as a
    plain one. Not seen on torch 2.12 and 2.13 (test_compile).
    """
    for other in [other for other in hooks if other != name]:
        hooks[other] = hooks.pop(other)


def skip_standalone_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile read a function where compiled code calls it, and leave it alone everywhere else.

    Behind a graph break hooks are called by code that is not compiled, and would be compiled by themselves, once for
    each layer until torch gives up and says so. As ``torch._dynamo.eval_frame.skip_code`` does, for what the function
    calls as well, and without the seconds that importing it takes (test_compile).
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


count_modes, without_modes = torch._C._len_torch_dispatch_stack, _disable_current_modes
"""How many dispatch modes see what is computed, and a context in which none does (test_compile).

Selective checkpointing is one: it replays results in the order of operations, and refuses changed ones.
"""
_SIMULATIONS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_simulated(x: Tensor) -> bool:
    """Whether a forward is run to be transformed or traced, and not to compute anything: there is nothing to measure.

    Under ``torch.func``, ``make_fx``, ``aot_module``, fake tensors, ``torch.jit.trace`` and on the meta device a tensor
    stands for others, and changing a plain tensor in place by it fails (test_plain_module).
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or (count_modes() > 0 and any(torch._C._get_dispatch_mode(mode) is not None for mode in _SIMULATIONS))
        or torch._C._is_tracing()
        or (type(x) is not Tensor and any(one.__name__ in ("FakeTensor", "Proxy") for one in type(x).__mro__))
        or getattr(x, "is_meta", False)
    )


def is_compiling_no_training() -> bool:
    """Whether the compiler reads a forward to export it, or under ``torch.func``: there is nothing to measure.

    The flag and not ``torch.compiler.is_exporting()``, which torch.compile takes to be true on torch 2.11. It takes the
    None of an empty stack to be something else than None, but knows its type (test_plain_module).
    """
    functorch = torch._C._functorch
    is_transform = isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter)
    return bool(torch.compiler._is_exporting_flag) or is_transform


def alias_output(output: Tensor) -> Tensor:
    """A view of a layer's output for the model to go on with, while our measuring alone reads the output itself.

    Otherwise torch.compile keeps for the backward, and does not compute again, what follows from a tensor that an
    operation which cannot be fused has read, as ours: of every GELU behind a layer in bfloat16 the derivative was kept
    in float32. There are two views, because a single one that changes nothing would be taken out again. This matters
    behind dense layers that are given sequences; behind convolutions it would cost residual networks a copy of
    gradients (test_compile).
    """
    return output.unsqueeze(0).squeeze(0)


def register_post_grad_pass(merge: Callable[[Graph], None], *files: str) -> None:
    """Have Inductor call a function with each graph that nothing is changed in place in, before it makes code of it.

    There is one place for such a function, in its configuration; one that is somebody else's is left there. What the
    files contain, and this one, is part of what compiled code is stored under. Seen on torch 2.11 to 2.13. Guarded by
    tests/kernels/test_merging.py.
    """
    from torch._inductor import config, custom_graph_pass

    if config.post_grad_custom_post_pass is not None:
        return

    class Merging(custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            merge(graph)

        def uuid(self) -> Any:
            return custom_graph_pass.get_hash_for_files((*files, __file__))

    config.post_grad_custom_post_pass = Merging()


class Memory(NamedTuple):
    """What a tensor lies in, alone or with its views."""

    storage: int
    bytes: int


def memory_of(node: Node) -> Memory:
    """Where the result of a graph's node will lie; nothing at all if it is not a tensor.

    Tensors that stand for others while code is compiled share storage where those will. If code is compiled for all
    sizes, this is of the sizes at hand, for which it is not compiled alone. One that is known only when the code runs,
    as of the entries that are not zero, counts as none. Seen on torch 2.11 to 2.13. Guarded by
    tests/kernels/test_merging.py.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return Memory(0, 0)
    storage = value.untyped_storage()
    size: Any = storage.nbytes()
    return Memory(storage._cdata, size if isinstance(size, int) else int(size.node.hint or 0))


def at_fixed_address(tensor: Tensor) -> Tensor:
    """Say that a tensor on a GPU stays where it is, so that compiled CUDA graphs need no copy of it.

    As ``torch._dynamo.mark_static_address`` does, without the seconds that importing it takes (test_cuda).
    """
    if tensor.is_cuda:
        tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def direct_launch(compiled: Any) -> Callable[..., None]:
    """Launch a compiled Triton kernel without Triton's dispatcher, most of what a launch costs (test_cuda).

    ``compiled`` is what ``kernel[grid](...)`` returned. An address is taken for a tensor. Seen on Triton 3.6.
    """
    raw_stream = torch._C._cuda_getCurrentRawStream
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(device: int, grid: tuple[int, int, int], *arguments: Any) -> None:
        run(*grid, raw_stream(device), function, metadata, None, None, None, *arguments)

    return launch
