"""All that leans on torch's insides: what torch does, on which versions that was seen, and which test guards it.

Nothing here is promised by torch's documentation. When a new torch breaks one of these, the named test fails.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.fx import Graph, Node
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from .errors import ScriptingError

# --- Steps that GradScaler leaves out ---------------------------------------------------------------------------------
#
# GradScaler.step() does not call optimizer.step() when a gradient overflowed, and has no hook that says so. The
# measurements of that batch must not count in the next step, so GradScaler.step is wrapped, once, to tell who asked.
# Seen on torch 2.11 to 2.13. Guarded by tests/promises/test_amp.py.

# Weak on both sides: listening to an optimiser's steps keeps neither it nor the listener's model alive.
_listeners: WeakKeyDictionary[Optimizer, list[WeakMethod[Callable[[Optimizer], None]]]] = WeakKeyDictionary()


def after_scaler_step(optimizer: Optimizer, method: Callable[[Optimizer], None]) -> None:
    """Call a bound method with the optimiser after each ``GradScaler.step(optimizer)``, whether or not it stepped."""
    if not getattr(GradScaler.step, "tells_maxgain", False):
        step = GradScaler.step

        @functools.wraps(step)
        def telling(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = step(scaler, optimizer, *args, **kwargs)
            stepped: dict[int, Any] = {}
            waiting: list[Any] = [optimizer]  # what was attached may be inside it
            while waiting:
                one = waiting.pop()
                if id(one) not in stepped:
                    stepped[id(one)] = one
                    waiting += optimizers_in(one)
            for one in stepped.values():
                for listener in list(_listeners.get(one, ())) if isinstance(one, Optimizer) else ():
                    if (method := listener()) is not None:
                        method(one)
            return result

        telling.tells_maxgain = True  # type: ignore[attr-defined]
        GradScaler.step = telling  # type: ignore[assignment, method-assign]
    _listeners.setdefault(optimizer, []).append(WeakMethod(method))


def forget_scaler_step(optimizer: Optimizer, method: Callable[[Optimizer], None]) -> None:
    """End what ``after_scaler_step`` began."""
    _listeners[optimizer].remove(WeakMethod(method))


def optimizers_in(wrapper: Any) -> list[Optimizer]:
    """The torch optimisers that a wrapper (Accelerate's, SAM, Lookahead) holds directly."""
    parts = [*getattr(wrapper, "__dict__", {}).values(), getattr(wrapper, "optimizer", None)]
    return list({id(part): part for part in parts if isinstance(part, Optimizer) and part is not wrapper}.values())


def found_inf(optimizer: Optimizer) -> Tensor | None:
    """Positive where a fused optimiser was told, inside ``GradScaler.step``, to leave its weights alone.

    GradScaler steps fused optimisers even if a gradient overflowed, sets this attribute, and the update is skipped on
    the device. Seen on torch 2.11 to 2.13. Guarded by tests/promises/test_amp.py.
    """
    return getattr(optimizer, "found_inf", None)


def is_within_a_step(optimizer: Optimizer) -> bool:
    """Whether the step whose hooks are being called was itself called by a step of the same optimiser.

    Torch wraps the ``step`` of every class that it made an optimiser of, so hooks are called twice where a class of
    one's own calls ``super().step()``, provided that somebody has made one of its base class before. The inner call is
    too early: what the class does to the weights afterwards would not be seen. Seen on torch 2.11 to 2.13. Guarded by
    tests/test_stepping.py.
    """
    code = getattr(type(optimizer).step, "__code__", None)  # the same for all that torch wraps
    frame, calls = sys._getframe(), 0
    while frame is not None and calls < 2:
        if frame.f_code is code and (frame.f_locals.get("args") or (None,))[0] is optimizer:
            calls += 1
        frame = frame.f_back  # type: ignore[assignment]
    return calls > 1


# --- Hooks ------------------------------------------------------------------------------------------------------------


class ForwardHook:
    """A forward hook that does not travel: a copied or pickled model is a plain module, without our types in it.

    Torch copies and pickles a module's hooks with it. Seen on torch 2.11 to 2.13. Guarded by
    tests/promises/test_plain_module.py.

    Before each call of compiled code torch checks all that its hooks read, in every layer. Dearest is an object that is
    reached in several ways, or from several layers: whether it still is the same one is asked in Python. Next comes the
    ``__call__`` of an object, while a method with a name is free if the object has slots, in which nothing can hide it.
    So hooks and what they call have slots, and share few objects. Seen on torch 2.11 to 2.13. Guarded by
    tests/promises/test_compiled_graphs.py.
    """

    __slots__ = ()

    @property
    def __name__(self) -> str:
        # torch.jit.script compiles the hooks of a module, and asks for their names first.
        raise ScriptingError(
            "a model cannot be scripted while a constraint watches it: call detach(), script it, and make a new one."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A callable of the standard library that takes anything and returns None, so it can stand in for a hook.
        return getattr, (contextlib.nullcontext(), "__exit__")


def only_looks(hook: Any) -> bool:
    """Whether a hook is ours, or what stands in for one of ours in a copy: it changes nothing."""
    return isinstance(hook, ForwardHook) or isinstance(getattr(hook, "__self__", None), contextlib.nullcontext)


def show_hooks_to_compiler(module: nn.Module) -> None:
    """Make torch.compile notice that this module now has a hook.

    torch.compile does not check for hooks before it runs what it compiled without them, for this model or for another
    one of the same architecture. It does check the type of a module's dictionary of parameters, so that is changed to
    another type that behaves the same. Seen on torch 2.11 to 2.13. Guarded by tests/promises/test_compile.py
    (promise 11).
    """
    module.__dict__["_parameters"] = OrderedDict(module._parameters)


def hide_hooks_from_compiler(module: nn.Module) -> None:
    """Undo ``show_hooks_to_compiler`` once the last hook of ours is gone."""
    if not any(isinstance(hook, ForwardHook) for hook in module._forward_hooks.values()):
        module.__dict__["_parameters"] = dict(module._parameters)


@contextlib.contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a module on the side, without autocast: its buffers and the random numbers are afterwards as they were.

    The buffers are replaced by copies meanwhile; what was done to one in place and undone would upset autograd.
    Guarded by tests/test_proof.py.
    """
    buffers = [(part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    try:
        for home, name, buffer in buffers:
            home[name] = None if buffer is None else buffer.clone()
        with (
            torch.random.fork_rng([device] if device.type == "cuda" and not is_capturing(device) else []),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        for home, name, buffer in buffers:
            home[name] = buffer


# --- Compiling and capturing ------------------------------------------------------------------------------------------


def put_first(hooks: dict[int, Any], name: int) -> None:
    """Have one of a module's hooks called before the others.

    The others are added again behind it. ``prepend=True`` and ``move_to_end`` would leave it where it was for the
    compiler of torch 2.11, which reads an ordered dictionary as a plain one. Not seen on torch 2.12 and 2.13. Guarded
    by tests/promises/test_compile.py.
    """
    for other in [other for other in hooks if other != name]:
        hooks[other] = hooks.pop(other)


def only_as_a_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile read a function where compiled code calls it, and leave it alone everywhere else.

    Behind a graph break hooks are called by code that is not compiled. torch.compile would then compile them by
    themselves, once for each layer until it gives up, and say so. As ``torch._dynamo.eval_frame.skip_code`` does, for
    what the function calls as well, and without the seconds that importing it takes. Seen on torch 2.11 to 2.13.
    Guarded by tests/promises/test_compiled_graphs.py.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def is_exporting() -> bool:
    """Whether torch.export is tracing the model, whose program must not contain our measuring.

    The flag and not ``torch.compiler.is_exporting()``, which torch.compile takes to be true on torch 2.11.
    Guarded by tests/promises/test_plain_module.py.
    """
    return bool(torch.compiler._is_exporting_flag)


_SIMULATIONS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def is_simulated(x: Tensor) -> bool:
    """Whether a forward is run to be transformed or traced, and not to compute anything: there is nothing to measure.

    Under ``torch.func`` (grad, vmap, jacrev), ``make_fx``, ``aot_module``, fake tensors, ``torch.jit.trace`` and on the
    meta device a tensor stands for others, and changing a plain tensor in place by it fails. Seen on torch 2.11 to
    2.13. Guarded by tests/promises/test_transforms.py.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or (
            torch._C._len_torch_dispatch_stack() > 0
            and any(torch._C._get_dispatch_mode(mode) is not None for mode in _SIMULATIONS)
        )
        or torch._C._is_tracing()
        or (type(x) is not Tensor and any(one.__name__ in ("FakeTensor", "Proxy") for one in type(x).__mro__))
        or getattr(x, "is_meta", False)
    )


count_modes, without_modes = torch._C._len_torch_dispatch_stack, _disable_current_modes
"""How many dispatch modes of somebody else's see what is computed, and a context in which none does.

Selective activation checkpointing is one: it hands the results that it kept in the forward to the recomputation, in the
order of the operations, and refuses those that were changed since. A counter of operations is another. Seen on torch
2.11 to 2.13. Guarded by tests/promises/test_compile.py.
"""


def is_transformed() -> bool:
    """Whether compiled code applies ``torch.func`` to a forward, which it does not simulate otherwise.

    torch.compile takes the None of an empty stack to be something else than None, but knows its type. Seen on torch
    2.11 to 2.13. Guarded by tests/promises/test_transforms.py.
    """
    functorch = torch._C._functorch
    return isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter)


def set_apart(output: Tensor) -> Tensor:
    """A view of a layer's output for the model to go on with, while our measuring alone reads the output itself.

    Otherwise torch.compile keeps more for the backward. It keeps, and does not compute again, what is computed from a
    tensor that an operation which cannot be fused has read before. Measuring is such an operation: of every GELU behind
    a layer in bfloat16 the derivative was kept in float32. What is computed from an earlier view is not affected. There
    are two views, because a single one that changes nothing would be taken out again.

    This matters behind dense layers that are given sequences, whose output is a view itself. Behind convolutions it
    would cost gradients of residual networks a copy. The model cannot call ``detach_()`` on a view, and so no longer on
    the output of such a layer without a bias; with a bias it never could. Seen on torch 2.11 to 2.13. Guarded by
    tests/promises/test_compiled_graphs.py.
    """
    return output.unsqueeze(0).squeeze(0)


def merge_before_code_is_made(merge: Callable[[Graph], None], *files: str) -> None:
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
    """Say that the tensor stays where it is, so that compiled CUDA graphs need no copy of it.

    As ``torch._dynamo.mark_static_address`` does, without the seconds that importing it takes. Seen on torch 2.11 to
    2.13. Guarded by tests/promises/test_cuda.py.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def is_capturing(device: torch.device) -> bool:
    """Whether work on this device is being recorded into a CUDA graph, where the host must not look at any result."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def direct_launch(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """Launch a compiled Triton kernel without going through Triton's dispatcher, which is most of what a launch costs.

    ``compiled`` is what ``kernel[grid](...)`` returned. Its ``run`` takes what ``compiled[grid]`` passes it, after
    asking for the device, the stream and the hooks of profilers. Of a tensor it asks the driver where it lies; an
    address is taken as it is. Seen on Triton 3.6. Guarded by tests/promises/test_cuda.py.
    """
    raw_stream = torch._C._cuda_getCurrentRawStream
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(device: int, *arguments: Any) -> None:
        run(*grid, raw_stream(device), function, metadata, None, None, None, *arguments)

    return launch
