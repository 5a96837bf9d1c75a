"""Whether dividing a layer's weight divides its ``Wx``, which every projection rests on.

For the types in ``layers`` it is known. A subclass with a forward of its own may do anything to its weight first: one
that standardises it computes the same ``Wx`` for W and W/2, and dividing its weight would shrink it towards zero
without its gain ever coming down. So such a layer is tried, once, before its weight is divided for the first time.

A registered type is taken at its word, and a forward may change its mind later. So weights are looked at from time to
time: one that is divided over and over while its size stays as it was is noticed, and named.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_quirks
from .coverage import Share
from .distributed import is_flat_shard, whole, whole_weights
from .errors import MaxGainError, UnsupportedLayerError
from .later import Asked
from .layers import FoundLayer, Instance, refusals

TOLERANCE = 0.02
"""By which fraction of ``Wx`` half the weight may miss half of it: rounding, and quantisation in training, do that."""
ROUGHLY = 0.1
"""The same where other parameters are made up, with which quantisation may be coarser."""
OUT_OF_PROPORTION = 1000.0
"""By how much a size may grow over the norm of its weight.

Of a linear layer their ratio depends on the direction of W alone: for p = 2 and a matrix of rank r it lies between
``1 / sqrt(r)`` and 1, as far as an input that W amplifies is in the batch. So no learning rate and no noise leads here.
"""
HARDLY_THERE = 100.0
"""By how much the weight itself must have shrunk meanwhile."""
DOES_NOT_HALVE = (
    "halving its weight does not halve its Wx, so dividing the weight would not bring its gain down (its type has a "
    "forward of its own)"
)
BIAS_STAYS = (
    "its output less its bias is not its Wx, so its gain cannot be seen (its type has a forward of its own: with an "
    "activation or a factor behind the bias, say)"
)
OTHER_DIMENSIONS = (
    "it reads its input along other dimensions than a layer of its kind, so its gain would be something else's (its "
    "type has a forward of its own)"
)
SLIPPING = (
    "its weight has been divided step after step and is hardly there any more, but its gain has not come down, so its "
    "Wx is not proportional to its weight"
)
FLAT_SHARD = (
    "FullyShardedDataParallel keeps its weight in flat shards, which cannot be read as a matrix between forwards "
    "(fully_shard's can, and MaxGain of a plain layer with measure='stale' need not)"
)


def expect_whole_weights(layers: Sequence[FoundLayer]) -> None:
    """Refuse the flat shards of FullyShardedDataParallel, for constraints that read weights outside of a forward."""
    if flat := [layer for layer in layers if is_flat_shard(layer.weight)]:
        refused = [(layer.name, layer.module, FLAT_SHARD) for layer in flat]
        raise UnsupportedLayerError(refusals(refused, "constrained"))


def expect_parts_to_show(proofs: Iterable[Proof]) -> None:
    """Refuse layers whose ``Wx`` is not where their type has it, as far as that can be tried; what they keep is let go.

    They have been called once, in a way that was noted.
    """
    refused = []
    for proof in proofs:
        if (objection := proof.against_looking()) is not None:
            refused.append((proof.layer.name, proof.layer.module, objection))
        proof.let_go()
    if refused:
        raise UnsupportedLayerError(refusals(refused, "measured"))


class Proofs:
    """The layers of a model whose forward is their own, until it was tried."""

    def __init__(self, layers: Sequence[FoundLayer], instance: Instance | None) -> None:
        self.open = {layer.name: Proof(layer, instance) for layer in layers}
        """Those that the next step tries."""
        self._waiting: dict[str, Proof] = {}
        """Those whose weights no step divides as yet: they are frozen, have no bound, or are somebody else's."""

    def notes(self) -> dict[str, Callable[..., None]]:
        """What is to be told how each of the layers is called."""
        return {name: proof.note for name, proof in (self.open | self._waiting).items()}

    def wake(self, share: Share) -> None:
        """From now on steps divide the weights of this share."""
        woken = [layer.name for layer in share.divided_layers if layer.name in self._waiting]
        self.open |= {name: self._waiting.pop(name) for name in woken}

    def settle(self, share: Share, known: Sequence[bool], device: torch.device) -> None:
        """Before weights of layers that were seen are divided, find out whether they may be; if not, raise and name it.

        Those that this step does not divide wait for one that does.
        """
        seen = (layer for layer, k in zip(share.layers, known, strict=True) if k)
        waiting, divided = [layer for layer in seen if layer.name in self.open], share.divided_layers
        if not waiting:
            return
        if torch_quirks.is_capturing(device):
            raise MaxGainError(
                f"layer {waiting[0].name!r} has a forward of its own, which the first step tries out: "
                "take one step before a CUDA graph is captured."
            )
        refused = []
        for layer in waiting:
            proof = self.open[layer.name]
            if (objection := proof.objection() if layer in divided else proof.against_looking()) is not None:
                refused.append((layer.name, layer.module, objection))
                continue
            del self.open[layer.name]
            proof.let_go()
            if layer not in divided:
                self._waiting[layer.name] = proof
        if refused:
            raise _not_proportional(refused)


class Proof:
    """Remembers how a layer is called, and tries whether halving its weight halves its ``Wx``."""

    def __init__(self, layer: FoundLayer, instance: Instance | None = "auto") -> None:
        self.layer = layer
        self.instance = instance
        """What is taken for one x; None where the weight alone is looked at, and not what the layer returns."""
        self._shape: tuple[int, ...] | None = None
        self._others: tuple[Any, ...] = ()
        self._keywords: dict[str, Any] = {}

    def note(self, x: Any, output: Any, others: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Of the first call that shows anything: the shape of its input, and what it was given besides."""
        if self._shape is None and isinstance(x, Tensor) and x.numel():
            self._others, self._keywords = others, keywords
            # Two instances are enough, unless each was given something else besides, or they are normalised together.
            all_of_them = others or keywords or x.dim() < 2 or not self.layer.kind.needs_output
            few = x.shape[:1] if all_of_them else (min(2, len(x)),)
            self._shape = (*few, *x.shape[1:])

    def let_go(self) -> None:
        """Forget what the first call was given besides its input: activations, perhaps, and all they were made of."""
        self._others, self._keywords = (), {}

    def objection(self) -> str | None:
        """Why the layer's weight must not be divided; None if it may be."""
        if is_flat_shard(self.layer.weight):
            return FLAT_SHARD
        try:
            return self._seen()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a forward is arbitrary code
            said = str(error).strip().partition("\n")[0]
            unseen = "" if self._shape else "; how it is called is seen in a batch that is not compiled: run one first"
            return (
                "its type has a forward of its own, and whether that is linear in its weight could not be tried "
                f"({type(error).__name__}: {said}{unseen})"
            )

    def against_looking(self) -> str | None:
        """Why what is seen of the layer must not be taken for its ``Wx``, as far as that can be tried."""
        if self.instance is None or is_flat_shard(self.layer.weight):
            return None
        try:
            return self._against_measuring({}, TOLERANCE)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a forward is arbitrary code
            return None

    @torch.no_grad()
    def _seen(self) -> str | None:
        """What running the layer shows that there is against dividing its weight, or against what is measured of it."""
        if not self.layer.kind.needs_output:
            # An activation may lie between Wx and the output. But where the weight alone scales what is normalised, a
            # weight of zero leaves nothing of the input; 1 + weight, say, would leave it all.
            x, nothing = self._input(), torch.zeros_like(whole(self.layer.weight))
            equal = torch.equal(self._part(nothing, x, {}), self._part(nothing, -x, {}))
            return self._against_measuring({}, TOLERANCE) if equal else DOES_NOT_HALVE
        objection, later = self._against({}, TOLERANCE), self._later()
        if objection is None and later and self.layer.weight.requires_grad:
            with contextlib.suppress(Exception):  # made up as they are, they may be no parameters for this forward
                objection = self._against(later, ROUGHLY)
        return objection

    def _against(self, given: dict[str, Tensor], tolerance: float) -> str | None:
        """What there is against the layer with these in the place of other parameters."""
        x, weight, others, full = self._trial(given)
        halved = self._part(weight / 2, x, others)
        if _differ(2 * halved, full, tolerance):
            return DOES_NOT_HALVE
        return None if self.instance is None else self._against_measuring(given, tolerance)

    @torch.no_grad()
    def _against_measuring(self, given: dict[str, Tensor], tolerance: float) -> str | None:
        """What there is against taking what is seen of the layer for its ``Wx``."""
        if not self.layer.kind.needs_output:
            return OTHER_DIMENSIONS if self._scales_elsewhere() else None
        x, weight, others, full = self._trial(given)
        if self._mixes(x, weight, others, full):
            return OTHER_DIMENSIONS
        # A bias as large as Wx must not show: or something is done to both together.
        biased = self._part(weight, x, others, bias=full.square().mean().sqrt().item())
        return BIAS_STAYS if _differ(biased, full, tolerance) else None

    def _mixes(self, x: Tensor, weight: Tensor, others: dict[str, Tensor], full: Tensor) -> bool:
        """Whether ``Wx`` of an instance, the last one, is another if the other instances are."""
        dims = self.layer.instance_dims(x, self.instance or "auto")
        instances = x.shape[: x.dim() - dims]
        if not self.layer.kind.output_is_part or instances != full.shape[: full.dim() - dims] or instances.numel() < 2:
            return False
        flipped = -x
        flipped.view(instances.numel(), -1)[-1].neg_()
        alone, beside = (z.reshape(instances.numel(), -1)[-1] for z in (full, self._part(weight, flipped, others)))
        return _differ(beside, alone, ROUGHLY)

    def _scales_elsewhere(self) -> bool:
        """Whether a normalisation's first scale shows in the output where its row does not have it."""
        if self._shape is None:  # its weight alone is looked at, or its first forward was compiled
            return False
        x, nothing = self._input(), torch.zeros_like(whole(self.layer.weight))
        first = nothing.clone()
        first.view(-1)[0] = 1
        with whole_weights(self.layer.module, {self.layer.kind.weight: first}):
            where = self.layer.kind.linear_part(self.layer.module, x, None)[1] != 0
        without, scaled = (self._part(weight, x, {}) for weight in (nothing, first))
        return where.shape == scaled.shape and bool(((scaled != without) & ~where).any())

    def _later(self) -> dict[str, Tensor]:
        """Other parameters as training may make them: a factor that begins as 1 and a branch as 0 hide what they do."""
        own = {name: whole(one) for name, one in self.layer.module._parameters.items() if one is not None}
        return {
            name: torch.where(one == 0, 0.5, 1.5 * one)
            for name, one in own.items()
            if name not in ("bias", self.layer.kind.weight)
        }

    def _input(self) -> Tensor:
        weight = whole(self.layer.weight)
        shape = self._shape or self.layer.kind.input_shape(self.layer.module)
        x = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        return x.to(weight.device, weight.dtype)

    def _trial(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
        """An input, a weight, what takes the place of other parameters, and their ``Wx`` without a bias."""
        layer, x = self.layer, self._input()
        weight = whole(layer.weight)
        if (full := self._part(weight, x, given)).any():
            return x, weight, given, full
        # Its weight is zero, or something that it multiplies by is: zero tells nothing, so try it with numbers.
        generator = torch.Generator("cpu").manual_seed(1)
        numbers = {
            name: torch.randn(one.shape, generator=generator, device="cpu").to(one.device, one.dtype)
            for name, one in layer.module._parameters.items()
            if one is not None
        }
        weight = numbers[layer.kind.weight]
        if not (full := self._part(weight, x, numbers)).any():
            raise ValueError("its Wx is zero for any weight")
        return x, weight, numbers, full

    def _part(self, weight: Tensor, x: Tensor, others: dict[str, Tensor], bias: float = 0.0) -> Tensor:
        """``Wx`` (or the output, where that does not show it) with this weight and this bias.

        It is 0 as a rule: next to its own bias ``Wx`` might be lost in rounding.
        """
        layer, module = self.layer, self.layer.module
        x = x.clone()  # which the forward may change in place
        instead = others | {layer.kind.weight: weight}
        own = module._parameters.get("bias")
        if own is not None:
            numbers = torch.arange(own.numel(), dtype=torch.float32, device="cpu").cos()  # each another one's
            instead["bias"] = bias * numbers.view(own.shape).to(own.device, own.dtype)
        with torch_quirks.undisturbed(module, x.device), whole_weights(module, instead):
            output = module.forward(x, *self._others, **self._keywords)
            part = layer.kind.linear_part(module, x, output)[1] if layer.kind.needs_output else output
            return part.double()


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """By more than this fraction of the other."""
    return bool(torch.linalg.vector_norm(one - other) > tolerance * torch.linalg.vector_norm(other))


class Slipping:
    """Notices weights that shrink while their sizes do not: dividing them does not divide their ``Wx`` after all."""

    def __init__(self, layers: Sequence[FoundLayer]) -> None:
        self.places = [place for place, layer in enumerate(layers) if layer.kind.needs_output]
        self.layers = [layers[place] for place in self.places]
        self._least: dict[str, tuple[float, float]] = {}
        """The smallest size so far of each layer for a weight of norm 1, and the norm that its weight had then."""
        self._asked: Asked | None = None

    def look(self, sizes: Tensor, scales: Tensor) -> None:
        """Compare the sizes of all layers with the norms of their weights.

        To be called often at first, because the weight of a layer that was registered wrongly is soon gone. No
        accelerator is waited for: what one look asks for is what the next one sees.
        """
        if not self.layers or torch_quirks.is_capturing(sizes.device):
            return
        norms = [whole(torch.linalg.vector_norm(layer.weight.detach())).to(sizes) for layer in self.layers]
        found = torch.cat([sizes, scales, torch.stack(norms)])
        seen, self._asked = self._asked, Asked(found)
        if found.device.type == "cpu":
            seen = self._asked
        if seen is not None:
            count, values = len(sizes), seen.read()
            # Chosen here: an index that is a list would be sent to the device, which waits.
            self._judge([(values[place], values[count + place]) for place in self.places], values[2 * count :])

    def _judge(self, sizes_and_scales: list[tuple[float, float]], norms: list[float]) -> None:
        slipping = []
        for layer, (size, scale), norm in zip(self.layers, sizes_and_scales, norms, strict=True):
            if 0 < size < math.inf and 0 < norm < math.inf:
                now = ratio, _ = size * scale / norm, norm
                least, norm_then = self._least[layer.name] = min(now, self._least.get(layer.name, now))
                # Other inputs may show a larger size too, but only a weight that slips has lost as much itself.
                if scale < 1 and ratio > OUT_OF_PROPORTION * least and norm_then > HARDLY_THERE * norm:
                    slipping.append((layer.name, layer.module, SLIPPING))
        if slipping:
            raise _not_proportional(slipping)


def _not_proportional(refused: list[tuple[str, nn.Module, str]]) -> UnsupportedLayerError:
    advice = "Or tell what its linear part is with register_layer()."
    return UnsupportedLayerError(f"{refusals(refused, 'constrained')} {advice}")
