"""One row per layer type, and which layers of a model are measured and bounded.

A layer computes ``Wx + b``, so ``Wx`` is its own output less its bias: padding, stride, groups and dilation are in it
without W ever being written down. Normalisation layers are diagonal maps, whose ``Wx`` follows from the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from numbers import Real
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .errors import BoundError, MaxGainError, NothingToConstrainError, PatternError, UnsupportedLayerError
from .functional import without_bias
from .text import by_reason, listed

Bound = float | Mapping[str, float]
Globs = str | Iterable[str]
LinearPart = Callable[[Any, Tensor, Any], tuple[Tensor, Tensor]]


# --- One row per layer type -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerKind:
    """What there is to know of a layer type."""

    dims: int | None  # trailing dimensions of one instance; None: all but the first; 0: as many as the weight has
    linear_part: LinearPart  # (layer, input, output) → (x, Wx)
    form: Literal["affine", "batch_norm", "other"] = "other"  # which fused measurement computes linear_part
    weight: str = "weight"  # the parameter that scales Wx
    by_default: bool = True  # False where such a layer is taken only if include names it
    diagonal: Callable[[Any], Tensor] | None = None  # the diagonal of W, where W is a diagonal matrix
    output_dim: int = 0  # the dimension of the weight along which the outputs lie: 1 for transposed ones


def affine(dims: int, **options: Any) -> LayerKind:
    """The row of a layer that computes ``Wx + b``, with b along the first dimension of an instance."""

    def linear_part(layer: Any, x: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        return x, without_bias(output, getattr(layer, "bias", None), dims)

    return LayerKind(dims, linear_part, "affine", **options)


def _scaling(
    dims: int | None,
    normalised: Callable[[Any, Tensor], Tensor],
    diagonal: Callable[[Any], Tensor] = lambda layer: _wide(layer.weight),
    **options: Any,
) -> LayerKind:
    """The row of a layer whose ``Wx`` is a diagonal matrix times what it makes of its input."""

    def linear_part(layer: Any, x: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = normalised(layer, x), diagonal(layer)
        return x, x * (scale.view(-1, *[1] * (x.dim() - 2)) if dims is None else scale)

    return LayerKind(dims, linear_part, diagonal=diagonal, **options)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _batch_norm_scale(layer: Any) -> Tensor:
    """``α / sqrt(variance + ε)``, of the running variance, a steadier estimate than the batch's."""
    weight = _wide(layer.weight)
    return weight * torch.rsqrt(layer.running_var.to(weight.dtype) + layer.eps)


# A type of an optional dependency is named by its path, so that nothing is imported for it.
KINDS: dict[type[nn.Module] | str, LayerKind] = {
    nn.Linear: affine(1),
    nn.Conv1d: affine(2),
    nn.Conv2d: affine(3),
    nn.Conv3d: affine(4),
    nn.ConvTranspose1d: affine(2, output_dim=1),
    nn.ConvTranspose2d: affine(3, output_dim=1),
    nn.ConvTranspose3d: affine(4, output_dim=1),
    nn.modules.batchnorm._BatchNorm: _scaling(None, lambda m, x: x, _batch_norm_scale, form="batch_norm"),
    nn.LayerNorm: _scaling(0, lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps), by_default=False),
    nn.RMSNorm: _scaling(0, lambda m, x: F.rms_norm(x, m.normalized_shape, eps=m.eps), by_default=False),
    nn.GroupNorm: _scaling(None, lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps), by_default=False),
    "transformers.pytorch_utils.Conv1D": affine(1, output_dim=1),
    "torch_geometric.nn.dense.linear.Linear": affine(1),
}

_ONE_OPERATION = "its weights are used inside one operation"
UNSUPPORTED: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: f"{_ONE_OPERATION}: call split_attention(model) first",
    nn.RNNBase: _ONE_OPERATION,
    nn.RNNCellBase: _ONE_OPERATION,
    nn.Bilinear: "it is linear in each of two inputs, not in both",
}
_TABLES = ("embed", "pos", "codebook", "table", "token", "prompt")
"""Parameters and modules named so hold rows that are looked up or added; they multiply nothing."""


def register_layer(
    layer_type: type[nn.Module] | str,
    dims: int,
    linear_part: LinearPart | None = None,
    *,
    weight: str = "weight",
    by_default: bool = True,
) -> None:
    """Teach every constraint and report a layer type of your own.

    Args:
        layer_type: The class, or its qualified name.
        dims: How many trailing dimensions of its input make up one instance: 1 for a dense layer, 3 for a
            two-dimensional convolution.
        linear_part: ``linear_part(layer, input, output)`` returns ``(x, Wx)``. Without one the layer computes
            ``Wx + bias``, or ``Wx`` if it has no ``bias``.
        weight: The parameter's name. Dividing it must divide ``Wx``.
        by_default: Whether such layers are taken without being named by ``include``.

    Examples:
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.factor = nn.Parameter(torch.ones(3))
        ...     def forward(self, x):
        ...         return x * self.factor
        >>> register_layer(Scale, dims=1, weight="factor")
    """
    if not isinstance(layer_type, str) and not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise UnsupportedLayerError(f"layer_type must be a subclass of nn.Module or its path, not {layer_type!r:.60}.")
    form: Literal["affine", "other"] = "affine" if linear_part is None else "other"
    part = linear_part or affine(dims).linear_part
    KINDS[layer_type] = LayerKind(dims, part, form, weight, by_default)


# --- The layers of a model --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A layer of a model, or a block of its outputs."""

    name: str
    module: nn.Module
    kind: LayerKind
    own_forward: bool = False  # whether it has another forward than the type that its row is for
    part: tuple[int, int] | None = None  # which outputs of the module these are, (first, count); None: all

    @property
    def is_transposed(self) -> bool:
        """Whether outputs are the second dimension of the weight: transposed convolutions, transformers' Conv1D."""
        return self.kind.output_dim == 1

    @property
    def parameter(self) -> Any:
        """The parameter, looked up now: loading, sharding and pruning put another one in its place."""
        return self.module._parameters.get(self.kind.weight)

    @property
    def weight(self) -> Tensor:
        """The weight in use, computed or not; of a block of outputs, its rows."""
        weight: Tensor = getattr(self.module, self.kind.weight)
        return weight if self.part is None else weight.narrow(self.kind.output_dim, *self.part)

    def instance_dims(self, x_dim: int, instance: str = "auto") -> int:
        """How many trailing dimensions of an input of so many are one instance; with 'sample', all but the first."""
        dims = self.weight.dim() if self.kind.dims == 0 else self.kind.dims
        return x_dim - 1 if dims is None or (instance == "sample" and x_dim > dims) else dims

    def linear_part(self, x: Tensor, output: Any) -> tuple[Tensor, Tensor]:
        """``(x, Wx)`` of a call of the module."""
        x, z = self.kind.linear_part(self.module, x, output)
        return x, z if self.part is None else z.narrow(-(self.kind.dims or 1), *self.part)


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the input of a layer's call."""
    return args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))


@dataclass(frozen=True)
class Found:
    """The layers of a model to work on, and why others are not among them."""

    layers: list[Layer]
    skipped: dict[str, str]


def find_layers(
    model: nn.Module | Iterable[nn.Module],
    include: Globs | None = None,
    exclude: Globs = (),
    *,
    parts: Mapping[str, Iterable[str]] | None = None,
    rescale: bool = True,
) -> Found:
    """Find the layers to measure or, with ``rescale``, to bound, in the order of their registration; at least one.

    Without ``include`` every layer is taken whose kind is on by default. A layer that cannot be used is skipped, with
    the reason. ``parts`` maps globs to the names of equal blocks of a layer's outputs.
    """
    if not isinstance(parts, Mapping | None):
        raise PatternError(f'parts must map globs to names, such as {{"*.qkv": ("q", "k", "v")}}, not {parts!r:.60}.')
    included, excluded, parts = None if include is None else as_globs(include), as_globs(exclude), dict(parts or {})
    unused = {*(included or ()), *excluded, *parts}
    found, known = Found([], {}), list[str]()
    inside: tuple[str, ...] = ()  # the modules below one that is skipped are skipped with it
    for name, module in named_modules(model):
        kind, own_forward, reason = look_up(module, rescale=rescale)
        is_layer = kind is not None or reason is not None
        # Parameters that no layer's row is for can be named to exclude them; containers cannot.
        known_parameters = {"bias", kind.weight if kind else "weight"} if is_layer else set()
        others = {own for own, _ in module.named_parameters(recurse=False)} - known_parameters
        names = [name] * is_layer + [f"{name}.{other}".lstrip(".") for other in others]
        unused -= {glob for glob in unused if any(matches(one, glob) for one in names)}
        if not is_layer or name.startswith(inside):
            continue
        known.append(name)
        inside += (f"{name}.",) if reason else ()
        is_default = kind is None or kind.by_default
        if not (is_default if included is None else matches(name, *included)) or matches(name, *excluded):
            continue
        if kind is None or reason is not None:
            found.skipped[name] = str(reason)
        else:
            layer = Layer(name, module, kind, own_forward)
            blocks = [some for glob, some in parts.items() if matches(name, glob)]
            found.layers.extend(_split(layer, blocks[0]) if blocks else [layer])
    if unused:
        glob = sorted(unused)[0]
        hint = f" Write '{glob}.*' for those within." if any(matches(name, f"{glob}.*") for name in known) else ""
        raise PatternError(f"the pattern {glob!r} matches no layer; the layers are {listed(known)}.{hint}")
    if not found.layers:
        why = f": {by_reason(found.skipped)}" if found.skipped else ""
        raise NothingToConstrainError(
            f"{type(model).__name__} has no layer to work on{why}. Known are dense, "
            "convolutional and batch-norm layers; register_layer() adds a type; include and exclude choose."
        )
    return found


def named_modules(model: nn.Module | Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, by its dotted name; several models are numbered."""
    models: list[Any] = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Iterable) else []
    if not models or not all(isinstance(one, nn.Module) for one in models):
        said = "a class" if isinstance(model, type) else type(model).__name__
        raise UnsupportedLayerError(f"the model must be an nn.Module or a list of modules, not {said}.")
    seen: set[nn.Module] = set()
    for number, one in enumerate(models):
        for path, module in one.named_modules(seen, "" if len(models) == 1 else str(number)):
            # Compiling, distributing and sharding add steps to the names of what they wrap.
            yield ".".join(step for step in path.split(".") if step != "_orig_mod"), module


def look_up(module: nn.Module, *, rescale: bool = True) -> tuple[LayerKind | None, bool, str | None]:
    """Return a module's row, whether it has another forward than the row's type, and why it cannot be used, if so.

    Reads no computed weight, which might change it.
    """
    cls: Any
    for cls in type(module).__mro__:
        kind = KINDS.get(cls) or KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
        if kind is not None:
            break
        if cls in UNSUPPORTED:
            return None, False, UNSUPPORTED[cls]
    else:
        return None, False, None
    weight: Any = module._parameters.get(kind.weight, module)
    if weight is None:
        return None, False, None  # no affine transform: nothing to bound
    is_inner = getattr(type(module), "_conv_forward", None) is getattr(cls, "_conv_forward", None)
    is_plain = is_inner and type(module).forward in (cls.forward, nn.SyncBatchNorm.forward)
    reason = None
    if kind.form == "batch_norm" and getattr(module, "running_var", None) is None:
        reason = "it keeps no running variance (track_running_stats=False)"
    elif weight is module:
        if rescale or kind.diagonal is not None:
            reason = f"its {kind.weight!r} is computed by a parametrisation, pruning or weight norm: remove that first"
    elif is_lazy(weight):
        reason = "its size is unknown before a first batch: run one, then make the constraint"
    elif not weight.is_floating_point() or weight.element_size() < 2 or weight.layout != torch.strided:
        reason = "its weight is quantised, sparse or complex"
    return kind, not is_plain or "forward" in vars(module), reason


def _split(layer: Layer, blocks: Iterable[str]) -> list[Layer]:
    """The equal blocks of a layer's outputs, by their names."""
    names: list[Any] = list(blocks) if isinstance(blocks, Iterable) and not isinstance(blocks, str) else []
    why, outputs = "", layer.parameter.shape[layer.kind.output_dim]
    if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        why = f"needs a name for each part, such as ('q', 'k', 'v'), not {blocks!r:.60}"
    elif layer.kind.form != "affine" or (layer.is_transposed and getattr(layer.module, "groups", 1) > 1):
        why = f"({type(layer.module).__name__}) has no parts: pass dense layers or plain convolutions"
    elif outputs % len(names):
        why = f"has {outputs} outputs, which do not divide into {len(names)} parts"
    if why:
        raise PatternError(f"layer {layer.name!r} {why}.")
    size = outputs // len(names)
    return [
        Layer(f"{layer.name}[{part}]", layer.module, layer.kind, layer.own_forward, (i * size, size))
        for i, part in enumerate(names)
    ]


def uncovered(model: Any, layers: Iterable[Layer], skipped: Iterable[str], exclude: Globs) -> tuple[float, list[str]]:
    """Return the share of the trained matrices' entries without a bound, and the names of those of unknown types."""
    covered, excluded, skipped = {id(layer.parameter) for layer in layers}, as_globs(exclude), tuple(skipped)
    total, without, unknown = 0, 0, dict[str, int]()
    for path, module in named_modules(model):
        if not getattr(look_up(module)[0], "by_default", True):
            continue
        for own, weight in module.named_parameters(recurse=False):
            words = f"{type(module).__name__}.{own}".lower()
            is_matrix = not is_lazy(weight) and weight.requires_grad and weight.dim() > 1
            if not is_matrix or any(word in words for word in _TABLES):
                continue
            name = f"{path}.{own}".lstrip(".")
            ancestors = [*accumulate(name.split("."), "{}.{}".format)]
            total += weight.numel()
            if id(weight) not in covered and not any(matches(one, *excluded) for one in ancestors):
                without += weight.numel()
                if not set(skipped) & {*ancestors}:
                    unknown[name] = weight.numel()
    return without / max(1, total), sorted(unknown, key=lambda name: -unknown[name])


def check_instance(instance: Any) -> Any:
    """Return what names an instance."""
    if instance not in ("auto", "sample"):
        raise MaxGainError(f"instance must be 'auto' or 'sample', not {instance!r:.40}.")
    return instance


def check_every(every: Any) -> int:
    """Return a number of steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise MaxGainError(f"every must be a whole number from 1 on, not {every!r:.40}.")
    return every


# --- Bounds and globs -------------------------------------------------------------------------------------------------


def resolve_bounds(bound: Bound, names: list[str], what: str, skipped: Iterable[str] = ()) -> list[float]:
    """Return every layer's bound: one number for all, or that of the first glob of a mapping that matches.

    A glob may match layers that were skipped alone.
    """
    by_glob = bound if isinstance(bound, Mapping) else {"*": bound}
    for glob, value in by_glob.items():
        if not isinstance(glob, str):
            raise PatternError(f"{what} maps globs over layer names, such as '0' or 'features.*', not {glob!r:.40}.")
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not value >= torch.finfo(torch.float32).tiny:
            said = f"{value!r:.40}" if isinstance(value, Real | str | None) else type(value).__name__
            raise BoundError(
                f"{f'{what}[{glob!r}]' if by_glob is bound else what} must be a positive number (inf measures without "
                f"a bound), or a mapping of layer names to them, not {said}."
            )
        if not any(matches(name, glob) for name in (*names, *skipped)):
            hint = " Name the blocks in parts=… first." if glob.endswith("]") else ""
            raise PatternError(
                f"the pattern {glob!r} of {what} matches no layer; the layers are {listed(names)}.{hint}"
            )
    bounds = []
    for name in names:
        matching = [float(value) for glob, value in by_glob.items() if matches(name, glob)]
        if not matching:
            raise BoundError(f"{what} has no pattern for layer {name!r}: add '*': float('inf') to leave others free.")
        bounds.append(matching[0])
    return bounds


def as_globs(globs: Globs | None) -> tuple[str, ...]:
    """Return one glob or several as a tuple."""
    if globs is None:
        return ()
    several: tuple[Any, ...] = tuple(globs) if isinstance(globs, Iterable) and not isinstance(globs, str) else (globs,)
    if not all(isinstance(glob, str) for glob in several):
        raise PatternError(f"include and exclude take globs over layer names, such as 'features.*', not {globs!r:.60}.")
    return several


def matches(name: str, *globs: str) -> bool:
    """Whether one of the globs takes in a dotted name."""
    escaped = (glob.replace("[", "[[]") for glob in globs)  # a part's name has brackets in it
    return any(fnmatchcase(name, glob) for glob in (*globs, *escaped))
