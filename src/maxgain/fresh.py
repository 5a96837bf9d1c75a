"""Fresh gains: a layer's inputs are kept until the step, and measured with the weight as it is afterwards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from . import torch_quirks
from .distributed import whole, whole_weights
from .errors import UnsupportedLayerError
from .layers import FoundLayer, refusal
from .observe import RunningMaximum, Tally

MOST_KEPT = 64
"""How many inputs of a layer are kept; more are measured at once, with the weight as it is then."""


@dataclass(eq=False)
class Kept:
    """An input of a layer, the shape of its output, and what was kept before it.

    A chain and not a list, because torch.compile would compile again for each length of a list. It does not end in None
    either: the first input would then be another case than the others.
    """

    x: Tensor
    shape: torch.Size
    before: Kept | None
    """None in the chain's end alone, which is no input."""


def nothing_kept() -> Kept:
    """The end of a chain; each has its own, because torch.compile checks that what was one object still is."""
    return Kept(torch.empty(0, device="cpu"), torch.Size(), before=None)


class FreshMaximum(RunningMaximum):
    """Keeps the inputs of one layer's training-mode forwards, to take their gains with a weight that is yet to come."""

    __slots__ = ("kept", "kept_count")

    def __init__(self, layer: FoundLayer, index: int, tally: Tally) -> None:
        super().__init__(layer, index, tally)
        self.kept, self.kept_count = nothing_kept(), 0

    def see(self, layer: FoundLayer, x: Tensor, output: Tensor) -> None:
        """Keep what went into the layer."""
        if self.paused or not layer.module.training:
            return
        compiling = torch.compiler.is_compiling()
        if compiling and not torch.is_grad_enabled():
            return  # no step may come that would let go of it
        # A copy, because whoever owns the input may overwrite it before the step.
        self.kept = Kept(x.detach().clone(), (output if layer.kind.output_is_part else x).shape, before=self.kept)
        if not compiling:
            self.kept_count += 1
            if self.kept_count > MOST_KEPT:
                self.replay()

    @torch.no_grad()
    def replay(self) -> None:
        """Record the kept inputs' gains under the weights as they are now, and let go of them."""
        kept, layer = self.kept, self.layer
        with whole_weights(layer.module):
            while kept.before is not None:
                with torch.autocast(kept.x.device.type, enabled=False):
                    x = whole(kept.x).to(layer.weight.dtype)
                    self._record(layer, x, self._forward(x, kept.shape) if layer.kind.needs_output else None)
                kept = kept.before
        self.let_go()

    def let_go(self) -> None:
        """Forget the inputs that were kept."""
        self.kept, self.kept_count = nothing_kept(), 0

    def _forward(self, x: Tensor, shape: torch.Size) -> Tensor:
        module, kind = self.layer.module, self.layer.kind
        # A forward of somebody's own may draw random numbers and change buffers, as training alone should.
        is_known = kind.form is not None and not self.layer.own_forward
        try:
            with contextlib.nullcontext() if is_known else torch_quirks.undisturbed(module, x.device):
                output: Tensor = module.forward(x, **kind.forward_arguments(module, x, shape))
        except TypeError as error:
            reason = "its forward takes more than its input, which measure='fresh' does not keep"
            raise UnsupportedLayerError(refusal(self.layer, "measured afresh", reason)) from error
        return output
