"""Measure layers on a GPU in as few launches as there can be, however their inputs and outputs lie in memory.

The cost of an eager step is Python, not the GPU. So launches are planned once for tensors of some shapes, and a
compiled kernel is launched without Triton's dispatcher from its second launch on. In compiled code, where ``merging``
finds measurements soon after one another, layers share launches: a small one is measured in less time than its launch
takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce
from importlib.util import find_spec
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import direct_launch
from .planning import NUMBERS, POWERS, Entry, Kind, Layer, group, order

HAS_TRITON = find_spec("triton") is not None
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
DEVICES = {"cuda"}
LARGEST_INSTANCE = 1 << 26
"""One program adds up the sums of all parts of an instance."""
MAX_PLANS = 4096
"""A model whose shapes never repeat must not fill the memory with plans."""
TOO_SCATTERED = "its entries lie too scattered"
"""Why tensors are copied before they are measured."""


def as_lists(
    slot: int, x: Tensor, z: Tensor | None, vector: Tensor | None, variance: Tensor | None, channel_dims: int, dims: int
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Return the activations, the vectors and the numbers of one ``Layer``, but for its ε."""
    activations = [x] if z is None else [x, z]
    vectors = [one for one in (vector, variance) if one is not None]
    at_vector = -1 if vector is None else 0
    at_variance = at_vector + 1 if len(vectors) > 1 else -1
    return activations, vectors, [slot, 0, len(activations) - 1 or -1, at_vector, at_variance, channel_dims, dims]


def measure(
    maxima: Tensor, dropped: Tensor, resting: Tensor, slot: int, x: Tensor, z: Tensor | None, vector: Tensor | None,
    variance: Tensor | None, eps: float, channel_dims: int, dims: int, p: float,
) -> str:  # fmt: skip
    """Raise ``maxima[slot]`` to the largest gain of the batch by a kernel, or return why there is none for it.

    The arguments are those of ``maxgain.gain.record``.
    """
    if type(x) is not Tensor:
        return f"its input is a {type(x).__name__}"
    key = (  # flat, and before any list: this is most of what an eager launch costs
        x.shape, x.stride(), x.dtype, x.device, None if z is None else (z.shape, z.stride(), z.dtype, z.device),
        None if vector is None else (vector.dtype, vector.stride()),
        None if variance is None else (variance.dtype, variance.stride()),
        eps, channel_dims, dims, p, maxima.dtype, maxima.device,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        activations, vectors, numbers = as_lists(0, x, z, vector, variance, channel_dims, dims)
        plan = _plan(key, [Layer._make([*numbers, eps])], activations, vectors, p, maxima)
    if not plan.reason:
        given = [one for one in (x, z, vector, variance, maxima) if one is not None]
        _launch(plan, slot, given, maxima, dropped, resting)
    elif plan.reason == TOO_SCATTERED and any(
        one is not None and not one.is_contiguous() for one in (x, z, vector, variance)
    ):
        x, z, vector, variance = (None if one is None else one.contiguous() for one in (x, z, vector, variance))  # type: ignore[assignment]
        return measure(maxima, dropped, resting, slot, x, z, vector, variance, eps, channel_dims, dims, p)
    return plan.reason


def record_layers(
    maxima: Tensor, dropped: Tensor, resting: Tensor, activations: Sequence[Tensor], vectors: Sequence[Tensor],
    numbers: Sequence[int], eps: Sequence[float], p: float,
    *, record: Callable[..., None], is_idle: Callable[[Tensor, Sequence[int]], bool],
) -> None:  # fmt: skip
    """Measure layers, each of which has its numbers but for ε; ``record`` measures those that no launch does."""
    if is_idle(maxima, numbers[::NUMBERS]):
        return
    layers: Sequence[Layer] = [
        Layer._make([*numbers[NUMBERS * at : NUMBERS * (at + 1)], one]) for at, one in enumerate(eps)
    ]
    if len(layers) > 1:
        given = [*activations, *vectors, maxima]
        if not reduce(or_, [one.data_ptr() for one in given]) & 15:  # else there would be too many compiled kernels
            key = (
                *layers, p, maxima.dtype, maxima.device,
                *[(one.shape, one.stride(), one.dtype, one.device) for one in activations],
                *[(one.dtype, one.stride()) for one in vectors],
            )  # fmt: skip
            plan = _plans.get(key) or _plan(key, layers, activations, vectors, p, maxima)
            if plan.launches:
                _launch(plan, 0, given, maxima, dropped, resting)
            layers = plan.left
    for layer in layers:
        tensors = layer.tensors(activations, vectors)
        record(maxima, dropped, resting, layer.slot, *tensors, layer.eps, layer.channel_dims, layer.dims, p)


class Plan(NamedTuple):
    """How layers are measured."""

    launches: list[Launch]
    left: Sequence[Layer]
    """Those that no launch measures."""
    reason: str
    """Why, of the last of them."""
    workspace: int
    """How many numbers the launches write down meanwhile."""


_plans: dict[Any, Plan] = {}
_captured: dict[int, Plan] = {}
"""Plans whose tables CUDA graphs read, which are kept for as long as there may be such graphs: for ever."""


def _plan(
    key: Hashable, layers: Sequence[Layer], activations: Sequence[Tensor], vectors: Sequence[Tensor], p: float,
    maxima: Tensor,
) -> Plan:  # fmt: skip
    """Plan how tensors like these are measured, once for each key."""
    if maxima.is_cuda and torch.cuda.is_current_stream_capturing():  # when nothing can be copied to the GPU
        return Plan([], layers, "a CUDA graph was captured before the first such batch", 0)
    reasons = {layer: _objection(layer.tensors(activations, vectors), layer.dims, p, maxima) for layer in layers}
    groups, scattered = group([one for one in layers if not reasons[one]], activations, vectors, maxima.dtype)
    reasons |= dict.fromkeys(scattered, TOO_SCATTERED)
    launches, workspace = list[Launch](), 0
    for kind, entries in groups:
        launches.append(Launch(kind, entries, len(activations), p, workspace, maxima.device))
        workspace += launches[-1].workspace
    if len(_plans) >= MAX_PLANS:
        if maxima.is_cuda:
            torch.cuda.synchronize(maxima.device)  # launches may still read tables
        _plans.clear()
    left = [layer for layer in layers if reasons[layer]]
    plan = _plans[key] = Plan(launches, left, reasons[left[-1]] if left else "", workspace)
    return plan


def _objection(tensors: tuple[Any, ...], dims: int, p: float, maxima: Tensor) -> str:
    """Say why the kernel cannot measure tensors like these, wherever their entries lie."""
    x, z, *_ = tensors
    given = [one for one in tensors if one is not None]
    z = x if z is None else z
    instances, others = x.shape[: x.dim() - dims], z.shape[: z.dim() - dims]
    longest = max(math.prod(x.shape[len(instances) :]), math.prod(z.shape[len(others) :]))
    is_known = {one.dtype for one in given} <= DTYPES and maxima.dtype == torch.float32
    reasons = {
        "Triton is not installed": not HAS_TRITON,
        f"{maxima.device.type} is no GPU that Triton is used on": maxima.device.type not in DEVICES,
        "the model lies on several devices": any(one.device != maxima.device for one in given),
        f"the kernels know p = 1, 2 and inf, not {p:g}": p not in POWERS,
        "the kernels know float32, bfloat16 and float16 only": not is_known,
        "input and output differ in the number of instances": instances != others,
        "there is nothing to measure": not min(x.numel(), z.numel()),
        f"an instance has more than {LARGEST_INSTANCE} entries": longest > LARGEST_INSTANCE,
    }
    return next((reason for reason, holds in reasons.items() if holds), "") or compile_error(maxima.device)


def _launch(plan: Plan, slot: int, given: Sequence[Tensor], maxima: Tensor, dropped: Tensor, resting: Tensor) -> None:
    """Launch the kernels. The last tensor that is given stands for what is not there."""
    device = maxima.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _launch(plan, slot, given, maxima, dropped, resting)
    if maxima.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured[id(plan)] = plan
    workspace = maxima.new_zeros(plan.workspace) if plan.workspace else maxima
    pointers = [one.data_ptr() for one in given]
    is_aligned = not reduce(or_, pointers) & 15
    for launch in plan.launches:
        kernel, own = launch.kernel, workspace[launch.first :] if launch.first else workspace
        fixed = launch.table, own, maxima, dropped, resting
        addresses = [*launch.pick(pointers), *[one.data_ptr() for one in fixed]] if is_aligned else None
        if addresses is not None and kernel.direct is not None:  # for which no tensor need be picked
            kernel.direct(device, launch.grid, *addresses, slot, *kernel.constants)
        else:
            kernel(device, launch.grid, (*launch.pick(given), *fixed), addresses, slot)
    return None


class Launch:
    """Measures some entries."""

    def __init__(
        self, kind: Kind, entries: Sequence[Entry], activations: int, p: float, first: int, device: torch.device
    ) -> None:
        """``first`` is where its own part of the workspace begins."""
        told = order(kind, entries, p)
        self.grid, self.first = (told.programs, 1, 1), first
        self.workspace = 5 * -(-told.programs // 16) * 16 if told.is_in_parts else 0  # the next part is aligned
        self.table = _copied(torch.tensor(told.table, dtype=torch.int32), device)
        self.kernel = _kernel(told.constants, kind.dtypes, told.warps)
        places = [entry.places(activations) for entry in entries]
        places += [places[0]] * (len(told.table) - len(places))
        self.columns = [*zip(*places, strict=True)]

    def pick(self, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return what the kernel takes of each entry, of all that is given."""
        if len(self.columns[0]) == 1:
            return [(values[at],) for (at,) in self.columns]
        return [tuple([values[at] for at in column]) for column in self.columns]


class Kernel:
    """A kernel with its constants, launched directly once it is compiled."""

    def __init__(self, kernel: Any, constants: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.constants, self.warps = kernel, constants, warps
        self.direct: Callable[..., None] | None = None

    def __call__(
        self, device: int, grid: tuple[int, int, int], tensors: Sequence[Any], pointers: Sequence[Any] | None,
        *numbers: float,
    ) -> None:  # fmt: skip
        """Launch on the current stream of the device; the pointers are the tensors', in tuples where those are.

        None if tensors are not aligned: then Triton's dispatcher finds another compiled kernel.
        """
        if self.direct is not None and pointers is not None:
            self.direct(device, grid, *pointers, *numbers, *self.constants)
            return
        compiled = self.kernel[grid](*tensors, *numbers, *self.constants, num_warps=self.warps)
        if pointers is not None:
            self.direct = direct_launch(compiled)


@cache
def _kernel(constants: tuple[int, ...], dtypes: tuple[torch.dtype, ...], warps: int) -> Kernel:
    """One for all layers that differ in sizes alone; ``dtypes`` tells their compiled code apart."""
    from .triton_gains import gains_kernel

    return Kernel(gains_kernel, constants, warps)


def _copied(table: Tensor, device: torch.device) -> Tensor:
    """Copy to a GPU, which is waited for, but not for what it is doing.

    Another thread does so, as torch allows none that captures a CUDA graph to keep memory (test_cuda).
    """
    if device.type != "cuda":
        return table

    def copy() -> Tensor:
        with torch.cuda.stream(_stream_for_copies(device)):
            return table.to(device)

    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(copy).result()


@cache
def _stream_for_copies(device: torch.device) -> torch.cuda.Stream:
    """One for all, as each stream keeps memory of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def compile_error(device: torch.device) -> str:
    """Say why Triton cannot compile for this GPU, which is tried once; return nothing if it can."""
    try:
        import triton.language as tl

        from .triton_project import project_kernel

        with torch.cuda.device(device):
            one, zeros = torch.ones(1, device=device), torch.zeros(3, dtype=torch.int64, device=device)
            tensors = zeros, one, one, zeros, one, one, zeros, zeros, zeros
            project_kernel[1, 1, 1](*tensors, 1, 1, 0, tl.float32, 1, 16, 16, 1, True, num_warps=4)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # there may be no compiler, or no header of Python's, or the GPU may be too old
        said = str(error).strip().partition("\n")[0]
        return (
            f"Triton cannot compile for {device} ({type(error).__name__}: {said}). It needs a C compiler, Python's "
            "headers, and a recent GPU"
        )
    return ""
