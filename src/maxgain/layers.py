"""One row per layer type: all that the rest of the package knows of it.

A layer computes ``Wx + b`` from its input, so ``Wx`` is its own output without the bias. That includes padding,
stride, groups and dilation without ever writing W down. Normalisation layers are diagonal maps, and their ``Wx``
follows from the input alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import convolutions
from .errors import MaxGainError, NothingToConstrainError, PatternError, UnsupportedLayerError
from .functional import along_channels, batch_norm_diagonal, check_callable, check_count, check_is, without_bias

ITSELF = "(itself)"
"""What a model that is a single layer is called, because its dotted name is empty."""
LinearPart = Callable[[Any, Tensor, Any], tuple[Tensor, Tensor]]
Instance = Literal["auto", "sample"]


@dataclass(frozen=True)
class LayerKind:
    """What there is to know of a type of layer."""

    instance_dims: Callable[[nn.Module, Tensor], int]
    """How many trailing dimensions of the input (and of the linear part) make up one instance."""
    linear_part: LinearPart
    """``(layer, input, output) → (x, Wx)``."""
    needs_output: bool = True
    """False where ``linear_part`` follows from the input alone."""
    weight: str = "weight"
    """The attribute that scales ``Wx``."""
    form: Literal["affine", "batch_norm"] | None = None
    """Which of the fused kernels' forms ``linear_part`` has, if any."""
    by_default: bool = True
    """False where a layer of this kind is left alone unless it is named in ``include``."""
    linear_map: Literal[
        "Dense", "TransposedDense", "Convolution", "TransposedConvolution", "Diagonal", "OwnForward"
    ] = "OwnForward"
    """The class of ``lipschitz.maps`` that knows W; by name, so that constraints that need no norms import none."""
    units: int | None = 0
    """The dimension of the weight along which its units lie (within each group); None where it has no units."""
    diagonal: Callable[[nn.Module, torch.dtype], Tensor] | None = None
    """The diagonal of W, in the given type, where W is a diagonal matrix."""
    output_is_part: bool = True
    """False where a layer's output need not be ``Wx`` and a bias: there may be an activation behind it."""
    divides_by_its_input: bool = False
    """True where x is the input divided by its own size: Wx is linear in x, but not in the input."""
    forward_arguments: Callable[[Any, Tensor, torch.Size], dict[str, Any]] = lambda layer, x, shape: {}
    """What ``forward`` must be given besides this input to return an output of this shape again."""
    input_shape: Callable[[Any], tuple[int, ...]] = lambda layer: ()
    """The shape of an input that a layer of this kind takes, for those that have not been given one yet."""
    defect: Callable[[nn.Module], str | None] = lambda layer: None
    """Why a layer cannot be used although it is of this kind."""


def _without_bias(instance_dims: int) -> LinearPart:
    """``Wx`` as the layer's output less its bias, which lies along the first dimension of an instance."""
    return lambda layer, x, output: (x, without_bias(output, getattr(layer, "bias", None), instance_dims))


def _affine(instance_dims: int, **others: Any) -> LayerKind:
    """The row of a layer that computes ``Wx + b``: the usual case."""
    return LayerKind(lambda layer, x: instance_dims, _without_bias(instance_dims), form="affine", **others)


def _transposed_convolution(instance_dims: int) -> LayerKind:
    # Its weight is laid out as (inputs, outputs / groups, ...). It has several possible output sizes, and was told
    # which of them to take.
    return _affine(
        instance_dims,
        linear_map="TransposedConvolution",
        units=1,
        forward_arguments=convolutions.output_size,
        input_shape=convolutions.enough_input,
    )


def _normalisation(
    instance_dims: Callable[[Any, Tensor], int],
    normalised: Callable[[Any, Tensor], Tensor],
    *,
    diagonal: Callable[[Any, torch.dtype], Tensor] = lambda layer, dtype: layer.weight.detach().to(dtype),
    per_channel: bool,
    **others: Any,
) -> LayerKind:
    """The row of a layer whose ``Wx`` is a diagonal matrix times what it makes of its input."""

    def linear_part(layer: Any, x: Tensor, output: Tensor | None) -> tuple[Tensor, Tensor]:
        x = normalised(layer, x)
        scale = diagonal(layer, torch.promote_types(layer.weight.dtype, torch.float32))
        return x, x * (along_channels(scale, x.dim() - 1) if per_channel else scale)

    return LayerKind(
        instance_dims,
        linear_part,
        needs_output=False,
        linear_map="Diagonal",
        units=None,
        diagonal=diagonal,
        **others,
    )


def _batch_norm_diagonal(layer: Any, dtype: torch.dtype) -> Tensor:
    """Of the running variance, which is a steadier estimate than the batch's."""
    return batch_norm_diagonal(layer.weight.detach().to(dtype), layer.running_var.to(dtype), layer.eps)


def _batch_norm_defect(layer: Any) -> str | None:
    return "it keeps no running variance (track_running_stats=False)" if layer.running_var is None else None


def _channels_of_batch_norm(layer: Any) -> tuple[int, ...]:
    extents = next((n for kind, n in ((nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3)) if isinstance(layer, kind)), 0)
    return (2, layer.num_features, *[2] * extents)


def _whole_sample(layer: nn.Module, x: Tensor) -> int:
    return x.dim() - 1


def _over_last_dimensions(normalised: Callable[[Any, Tensor], Tensor]) -> LayerKind:
    """The row of a layer that divides each row of the last dimensions by its own size."""
    return _normalisation(
        lambda layer, x: len(layer.normalized_shape),
        normalised,
        per_channel=False,
        input_shape=lambda layer: (2, *layer.normalized_shape),
        divides_by_its_input=True,
        by_default=False,
    )


# A type of an optional dependency is named by its path, so that nothing has to be imported for it.
KINDS: dict[type[nn.Module] | str, LayerKind] = {
    nn.Linear: _affine(1, linear_map="Dense", input_shape=lambda layer: (2, layer.in_features)),
    nn.Conv1d: _affine(2, linear_map="Convolution", input_shape=convolutions.enough_input),
    nn.Conv2d: _affine(3, linear_map="Convolution", input_shape=convolutions.enough_input),
    nn.Conv3d: _affine(4, linear_map="Convolution", input_shape=convolutions.enough_input),
    nn.ConvTranspose1d: _transposed_convolution(2),
    nn.ConvTranspose2d: _transposed_convolution(3),
    nn.ConvTranspose3d: _transposed_convolution(4),
    nn.modules.batchnorm._BatchNorm: _normalisation(
        _whole_sample,
        lambda layer, x: x,
        diagonal=_batch_norm_diagonal,
        per_channel=True,
        defect=_batch_norm_defect,
        form="batch_norm",
        input_shape=_channels_of_batch_norm,
    ),
    nn.LayerNorm: _over_last_dimensions(lambda layer, x: F.layer_norm(x, layer.normalized_shape, eps=layer.eps)),
    nn.RMSNorm: _over_last_dimensions(lambda layer, x: F.rms_norm(x, list(layer.normalized_shape), eps=layer.eps)),
    nn.GroupNorm: _normalisation(
        _whole_sample,
        lambda layer, x: F.group_norm(x, layer.num_groups, eps=layer.eps),
        per_channel=True,
        input_shape=lambda layer: (2, layer.num_channels, 2, 2),
        divides_by_its_input=True,
        by_default=False,
    ),
    "transformers.pytorch_utils.Conv1D": _affine(
        1, linear_map="TransposedDense", units=1, input_shape=lambda layer: (2, layer.weight.shape[0])
    ),
}

_CALLED_INSIDE = "its weights are used inside one fused operation, so no input and output of a linear part can be seen"
REFUSED: dict[type[nn.Module] | str, str] = {
    nn.MultiheadAttention: f"{_CALLED_INSIDE} (split_attention(model) makes four dense layers of it)",
    nn.modules.linear.NonDynamicallyQuantizableLinear: _CALLED_INSIDE,
    nn.RNNBase: _CALLED_INSIDE,
    nn.RNNCellBase: _CALLED_INSIDE,
    nn.Bilinear: "it is linear in each of two inputs and not in both",
}
_REFUSED_PACKAGES = ("torch.ao.nn.quantized", "torch.ao.nn.quantizable", "bitsandbytes.nn", "torchao.quantization")


def register_layer(
    layer_type: type[nn.Module] | str,
    instance_dims: int,
    linear_part: LinearPart | None = None,
    *,
    weight: str = "weight",
    by_default: bool = True,
) -> None:
    """Teaches every constraint and report a layer type of your own.

    Args:
        layer_type: the class, or its qualified name where it is not to be imported.
        instance_dims: how many trailing dimensions of its input make up one instance: 1 for a dense layer, 3 for a
            two-dimensional convolution.
        linear_part: ``linear_part(layer, input, output)`` returns the pair ``(x, Wx)``. Without one the layer computes
            ``Wx + bias``, or ``Wx`` if it has no attribute ``bias``.
        weight: the name of the parameter. Dividing it must divide ``Wx``.
        by_default: whether constraints take such layers in without being told to by ``include``.

    Examples:
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.factor = nn.Parameter(torch.ones(3))
        ...     def forward(self, x):
        ...         return x * self.factor
        >>> register_layer(Scale, instance_dims=1, weight="factor")
    """
    if not isinstance(layer_type, str) and not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise MaxGainError(f"layer_type must be a subclass of nn.Module or its qualified name, not {layer_type!r:.60}.")
    instance_dims = check_count("instance_dims", instance_dims)
    check_is("weight", weight, str, "the name of a parameter")
    part = _without_bias(instance_dims)
    if linear_part is not None:
        part = _checked(check_callable("linear_part", linear_part), instance_dims)
    KINDS[layer_type] = LayerKind(
        lambda layer, x: instance_dims,
        part,
        weight=weight,
        by_default=by_default,
        output_is_part=linear_part is None,
    )


def _checked(linear_part: LinearPart, instance_dims: int) -> LinearPart:
    """A linear part of somebody's own that returns what it should, or says what it returned instead."""

    def checked(layer: Any, x: Tensor, output: Any) -> tuple[Tensor, Tensor]:
        pair: Any = linear_part(layer, x, output)
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(one, Tensor) and one.is_floating_point() for one in pair):
            raise TypeError(f"linear_part must return the tensors x and Wx, not {type(pair).__name__}")
        x, part = pair
        if part.shape[: max(0, part.dim() - instance_dims)] != x.shape[: max(0, x.dim() - instance_dims)]:
            raise TypeError(f"x of shape {tuple(x.shape)} and Wx of {tuple(part.shape)} count different instances")
        return x, part

    return checked


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """A layer of a model that can be measured."""

    name: str
    module: nn.Module
    kind: LayerKind
    own_forward: bool = False
    """True where it computes something else than the type that its row is for: it has a forward of its own."""

    @property
    def weight(self) -> nn.Parameter:
        """Looked up each time: ``load_state_dict(assign=True)`` and sharding put another parameter in its place."""
        weight: nn.Parameter = getattr(self.module, self.kind.weight)
        return weight

    def scalar(self, value: float) -> Tensor:
        """A number kept beside the weight, in float32 at least; on the host while the weight is on the meta device."""
        weight = self.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        return torch.full((), value, dtype=wide, device="cpu" if weight.is_meta else weight.device)

    def instance_dims(self, x: Tensor, instance: Instance = "auto") -> int:
        """How many trailing dimensions of an input make up one instance, or a whole sample if that is asked for."""
        dims = self.kind.instance_dims(self.module, x)
        return max(dims, x.dim() - 1) if instance == "sample" else dims


def find_layers(
    model: nn.Module,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    *,
    rescale: bool = True,
) -> list[FoundLayer]:
    """The layers of a model to work on, in the order of their registration.

    ``include`` and ``exclude`` are globs over dotted names; without ``include`` every layer whose kind is on by
    default is taken. A layer that cannot be measured (or, with ``rescale``, whose weight cannot be scaled in place)
    is refused by name, never skipped.
    """
    check_model(model)
    included, excluded = None if include is None else check_globs(include), check_globs(exclude)
    unused = {*(included or ()), *excluded}
    found: list[FoundLayer] = []
    refused: list[tuple[str, nn.Module, str]] = []
    known: list[str] = []
    inside_refused: tuple[str, ...] = ()
    for path, module in model.named_modules():
        # torch.compile adds a step to the names of what it wraps.
        name = ".".join(step for step in path.split(".") if step != "_orig_mod")
        kind, own_forward, reason = _look_up(module, rescale=rescale)
        if kind is None and reason is None:
            # What is no layer of a known kind can be excluded too, so that nobody is warned about it.
            held = [f"{name}.{one}".lstrip(".") for one, _ in module.named_parameters(recurse=False)]
            own = [name, *held] if held else []
            unused -= {glob for glob in unused & set(excluded) if any(matches(one, glob) for one in own)}
            continue
        known.append(name)
        unused -= {glob for glob in unused if matches(name, glob)}
        if name.startswith(inside_refused):
            continue
        is_excluded = any(matches(name, glob) for glob in excluded)
        is_by_default = included is None and (kind is None or kind.by_default)
        is_wanted = is_by_default or any(matches(name, glob) for glob in included or ())
        if reason is not None and (is_excluded or is_wanted):
            inside_refused += (f"{name}.",)
        if is_excluded or not is_wanted:
            continue
        if reason is not None:
            refused.append((name, module, reason))
        elif kind is not None:
            found.append(FoundLayer(name, module, kind, own_forward))
    if refused:
        raise UnsupportedLayerError(refusals(refused, "constrained" if rescale else "measured"))
    if unused:
        names = ", ".join(map(repr, known[:8]))
        raise PatternError(
            f"the pattern {sorted(unused)[0]!r} matches no layer; the layers are {names or 'none'}"
            f"{', ...' if len(known) > 8 else ''}."
        )
    if not found:
        raise NothingToConstrainError(
            f"{type(model).__name__} has no layer to work on"
            f"{' that include and exclude leave' if include is not None or exclude else ''}: "
            "dense, convolutional and batch-norm layers are known, and register_layer() adds a type of your own."
        )
    return found


def refusal(layer: FoundLayer, verb: str, reason: str) -> str:
    """What to say of a layer that turned out to be unusable."""
    return refusals([(layer.name, layer.module, reason)], verb)


def refusals(refused: list[tuple[str, nn.Module, str]], verb: str) -> str:
    """What to say of the layers that cannot be used, all of them at once."""
    (name, module, reason), *others = refused
    if not name:
        return f"the model itself ({type(module).__name__}) cannot be {verb}: {reason}."
    said = f"layer {name!r} ({type(module).__name__}) cannot be {verb}: {reason}."
    if not others:
        return f"{said} Leave it out with exclude={name!r}."
    names = [name for name, _, _ in refused]
    return f"{said} Neither can {', '.join(map(repr, names[1:]))}. Leave them out with exclude={names!r}."


def check_globs(patterns: Any) -> tuple[str, ...]:
    """The globs in one text or several; none for None."""
    if patterns is None or isinstance(patterns, str):
        return () if patterns is None else (patterns,)
    # An array has ideas of its own about what is equal and what can be iterated over.
    several = tuple(patterns) if isinstance(patterns, Iterable) and not hasattr(patterns, "shape") else (None,)
    if not all(isinstance(glob, str) for glob in several):
        raise PatternError(f"include and exclude take a glob over dotted layer names or several, not {patterns!r:.60}.")
    return several


def matches(name: str, glob: str) -> bool:
    """Whether a glob takes in a layer's dotted name."""
    if not isinstance(glob, str):
        raise PatternError(f"a pattern is a glob over dotted layer names, such as 'features.*', and not {glob!r}.")
    return name == glob or fnmatchcase(name, glob)  # a name may have brackets in it


def check_model(model: nn.Module) -> None:
    """Refuses what is not a model."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise UnsupportedLayerError(f"the model must be a torch.nn.Module, not {given}.")


def kind_of(module: nn.Module) -> LayerKind | None:
    """The row of a module's type; None where there is none."""
    return _look_up(module, rescale=False)[0]


def _look_up(module: nn.Module, *, rescale: bool) -> tuple[LayerKind | None, bool, str | None]:
    """The layer's row, whether it has a forward that the row's type does not have, and why it cannot be used, if so."""
    cls: Any
    for cls in type(module).__mro__:
        path = f"{cls.__module__}.{cls.__qualname__}"
        # What holds nothing (a quantisable addition, say) has nothing quantised in it.
        if cls.__module__.startswith(_REFUSED_PACKAGES) and module.state_dict():
            return None, False, "its weight is quantised"
        for key in (cls, path):
            if key in REFUSED and key not in KINDS:  # or somebody has registered it all the same
                return None, False, REFUSED[key]
            if key in KINDS:
                known = (cls.forward, nn.SyncBatchNorm.forward)  # which is its row's, on many devices
                inner = [getattr(one, "_conv_forward", None) for one in (type(module), cls)]  # a convolution's calls it
                own_forward = type(module).forward not in known or inner[0] is not inner[1]
                own_forward |= not {"forward", "_conv_forward"}.isdisjoint(vars(module))
                return KINDS[key], own_forward, defect(module, KINDS[key], rescale=rescale)
    return None, False, None


def defect(module: nn.Module, kind: LayerKind, *, rescale: bool = True) -> str | None:
    """Why a layer of a known kind cannot be used all the same, or no longer: it may have been changed since."""
    weight = getattr(module, kind.weight, None)
    if weight is None:
        return "it has no weight to scale (affine=False)" if kind.weight == "weight" else f"it has no {kind.weight!r}"
    if is_lazy(weight):
        return "its size is not known before a first batch has gone through the model; run one first"
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.layout != torch.strided:
        return "its weight is quantised, sparse or complex"
    if weight.element_size() < 2:
        return f"its weight is quantised to {weight.dtype}, in which nothing can be computed"
    if weight.dim() > 1 and not weight.numel():  # a vector may be a rank's share of a weight, FSDP1's
        return "its weight has no entries"
    if rescale and kind.weight not in module._parameters:
        return _why_not_a_parameter(module, kind.weight)
    return kind.defect(module)


def _why_not_a_parameter(module: nn.Module, name: str) -> str:
    """Why a weight cannot be divided in place."""
    if name in getattr(module, "parametrizations", ()):
        by = "a parametrisation"
    elif f"{name}_orig" in module._parameters:
        by = "pruning or spectral norm"
    elif f"{name}_g" in module._parameters:
        by = "weight norm"
    else:
        return (
            f"its {name!r} is no parameter of its own: something sets it before each forward, such as "
            "FullyShardedDataParallel with use_orig_params=False (use fully_shard, or use_orig_params=True)"
        )
    return f"its {name!r} is not a parameter but computed from others ({by}), so it cannot be scaled in place"
