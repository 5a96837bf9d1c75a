"""The one operator that torch.compile sees: it measures a layer, and changes packed tensors in place.

Written out, the changes of one packed tensor by many layers would become a chain of copies of it. The operator is
defined by the dispatcher's own means, because ``torch.library.custom_op`` adds some 100 µs of Python to every call.
"""

from collections.abc import Callable

import torch

_library = torch.library.Library("maxgain", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "record(Tensor(a!) maxima, Tensor(b!) counts, Tensor resting, int slot, Tensor x, Tensor? z, Tensor? vector, "
    "Tensor? variance, float eps, int channel_dims, int dims, float p) -> ()",
    tags=(torch.Tag.flexible_layout,),  # the compiler lays out x and z as it likes: the kernel reads any strides
)
_library.impl("record", lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]


def define_operator(record: Callable[..., None]) -> None:
    """Make ``maxgain::record`` of a function."""
    for backend in ("CPU", "CUDA", "MPS", "XPU"):
        _library.impl("record", record, backend)  # type: ignore[no-untyped-call]
