"""What a constraint leaves out: said once where that is a sizeable share of a model's matrices."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from .errors import MeasurementWarning
from .layers import FoundLayer, kind_of, matches

SIZEABLE = 0.1
"""Of all entries of the matrices that are trained."""
LOOK_UPS = (nn.Embedding, nn.EmbeddingBag)
"""What picks rows out of a matrix multiplies nothing by it."""


def tell_what_is_left_out(model: nn.Module, layers: Sequence[FoundLayer], exclude: str | Iterable[str]) -> None:
    """Warn if many trained weights have no bound although nobody asked for that, and if LoRA hides what is bounded."""
    globs = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    covered = {id(layer.weight) for layer in layers}
    matrices = {id(p): (name, p) for name, p in _matrices(model, globs)}
    left_out = {name: p.numel() for identity, (name, p) in matrices.items() if identity not in covered}
    share = sum(left_out.values()) / max(1, sum(p.numel() for _, p in matrices.values()))
    if share >= SIZEABLE:
        largest = sorted(left_out, key=lambda name: -left_out[name])
        names = ", ".join(map(repr, largest[:8])) + (f" and {len(largest) - 8} more" if len(largest) > 8 else "")
        warnings.warn(
            f"{share:.0%} of the weights in this model's matrices have no bound, because they belong to modules of a "
            f"type that is not known: {names}. register_layer() teaches a type; exclude says that it is meant.",
            MeasurementWarning,
            stacklevel=4,
        )
    adapters = [layer.name for layer in layers if {"lora_A", "lora_B"} & set(layer.name.split("."))]
    if adapters:
        warnings.warn(
            f"LoRA: {adapters[0]!r} and {len(adapters) - 1} more are bounded each on its own. What a layer and its "
            "adapter amplify together, W + BA, is not: merge the adapter to bound that.",
            MeasurementWarning,
            stacklevel=4,
        )


def _matrices(model: nn.Module, excluded: tuple[str, ...]) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained parameters of two dimensions and more that multiply something."""
    for path, module in model.named_modules():
        steps = [step for step in path.split(".") if step and step != "_orig_mod"]
        kind = kind_of(module)
        if isinstance(module, LOOK_UPS) or (kind is not None and not kind.by_default):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            around = [".".join([*steps, own][: i + 1]) for i in range(len(steps) + 1)]
            meant = any(matches(name, glob) for name in around for glob in excluded)
            if parameter.requires_grad and not is_lazy(parameter) and parameter.dim() >= 2 and not meant:
                yield around[-1], parameter
