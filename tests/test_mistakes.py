"""Mistakes in using a constraint, each answered with a named error that says what and where."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from maxgain import MaxGain, register_layer
from maxgain.errors import (
    AttachError,
    BoundError,
    MaxGainError,
    NormError,
    NothingToConstrainError,
    NotMeasuredError,
    PatternError,
    UnsupportedLayerError,
)
from small_net import hooks, net, sgd


@pytest.mark.parametrize("gamma", [0, -1.0, math.nan, "2", None, True, torch.tensor(2.0), -math.inf])
def test_a_bound_is_a_positive_number(gamma: Any) -> None:
    with pytest.raises(BoundError, match="gamma must be a positive number"):
        MaxGain(net(), gamma=gamma)


@pytest.mark.parametrize("p", [0, 0.99, -2, math.nan, "2", None])
def test_p_is_a_number_from_1_to_inf(p: Any) -> None:
    with pytest.raises(NormError, match="p must be a number from 1 to inf"):
        MaxGain(net(), p=p)


MISTAKES: dict[str, tuple[Callable[[], Any], type[MaxGainError], str]] = {
    "instance": (
        lambda: MaxGain(net(), instance="row"),
        MaxGainError,
        "instance must be 'auto' or 'sample', not 'row'",
    ),  # type: ignore[arg-type]
    "measure": (lambda: MaxGain(net(), measure="new"), MaxGainError, "measure must be 'stale' or 'fresh', not 'new'"),  # type: ignore[arg-type]
    "bound of a pattern": (
        lambda: MaxGain(net(), {"0": -1.0, "*": 2.0}),
        BoundError,
        r"gamma\['0'\] must be a positive",
    ),
    "pattern of gamma": (
        lambda: MaxGain(net(), {"conv*": 1.0, "*": 2.0}),
        PatternError,
        "'conv\\*' of gamma matches no",
    ),
    "layer without bound": (lambda: MaxGain(net(), {"0": 1.0}), BoundError, "gamma says nothing about layer '2'.*inf"),
    "no bounds": (lambda: MaxGain(net(), {}), BoundError, "gamma says nothing about layer '0'"),
    "include": (
        lambda: MaxGain(net(), include="head"),
        PatternError,
        "'head' matches no layer; the layers are '0', '2'",
    ),
    "exclude": (lambda: MaxGain(net(), exclude="1"), PatternError, "'1' matches no layer; the layers are '0', '2'"),
    "one pattern of several": (
        lambda: MaxGain(net(), include=["0", "body.*"]),
        PatternError,
        r"^the pattern 'body\.\*' matches no layer; the layers are '0', '2'",
    ),
    "type as pattern": (lambda: MaxGain(net(), include=[nn.Linear]), PatternError, "a glob over dotted layer names"),  # type: ignore[list-item]
    "type as key": (lambda: MaxGain(net(), {nn.Linear: 1.0}), PatternError, "a glob over dotted layer names"),  # type: ignore[dict-item]
    "nothing": (
        lambda: MaxGain(nn.Sequential(nn.ReLU())),
        NothingToConstrainError,
        "Sequential has no layer.*register_layer",
    ),
    "nothing but what is left alone": (
        lambda: MaxGain(nn.Sequential(nn.Embedding(3, 3), nn.LayerNorm(3))),
        NothingToConstrainError,
        "^Sequential has no layer to work on: ",
    ),
    "a model without parameters": (
        lambda: MaxGain(nn.ReLU()),
        NothingToConstrainError,
        "^ReLU has no layer to work on: ",
    ),
    "nothing left": (lambda: MaxGain(net(), exclude="*"), NothingToConstrainError, "that include and exclude leave"),
    "nothing included": (lambda: MaxGain(net(), include=[]), NothingToConstrainError, "that include and exclude leave"),
    "a layer type of no dimensions": (
        lambda: register_layer(nn.Flatten, 0),
        MaxGainError,
        "instance_dims must be a whole",
    ),
    "a layer type that is none": (lambda: register_layer(net(), 1), MaxGainError, "a subclass of nn.Module or its"),  # type: ignore[arg-type]
    "no linear part": (lambda: register_layer(nn.Flatten, 1, "x"), MaxGainError, "linear_part must be a function"),  # type: ignore[arg-type]
    "a class instead of a model": (
        lambda: MaxGain(nn.Linear),
        UnsupportedLayerError,
        "must be a torch.nn.Module, not the class Linear",
    ),  # type: ignore[arg-type]
    "no optimiser": (
        lambda: MaxGain(net()).attach("adam"),
        AttachError,
        "takes a torch.optim.Optimizer or a wrapper that holds one, not str",
    ),  # type: ignore[arg-type]
    "another's optimiser": (
        lambda: MaxGain(net()).attach(sgd(net())),
        AttachError,
        r"this SGD holds none of the 2 constrained weights \('0', ...\)",
    ),
}


@pytest.mark.parametrize(("mistake", "error", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_promise_15_mistakes_are_answered_in_words(
    mistake: Callable[[], Any], error: type[MaxGainError], text: str
) -> None:
    with pytest.raises(error, match=text):
        mistake()


def test_a_registered_type_without_the_weight_that_was_named_is_refused_by_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_layer(nn.Bilinear, 1, weight="factor")
    monkeypatch.setattr("maxgain.layers.REFUSED", {})
    with pytest.raises(UnsupportedLayerError, match=r"layer '0' .* cannot be constrained: it has no 'factor'"):
        MaxGain(nn.Sequential(nn.Bilinear(2, 2, 2)))


def test_a_constraint_that_could_not_be_made_leaves_no_hooks() -> None:
    model = net()
    with pytest.raises(MaxGainError):
        MaxGain(model, {"0": 1.0})
    assert hooks(model) == 0


def test_an_optimiser_is_attached_once() -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model).attach(optimiser)
    with pytest.raises(AttachError, match="this SGD is attached to this MaxGain already"):
        constraint.attach(optimiser)


def test_a_step_by_hand_after_detaching_says_so() -> None:
    constraint = MaxGain(net())
    constraint.detach()
    with pytest.raises(AttachError, match="is detached and measures nothing"):
        constraint.step()


def test_a_step_without_any_forward_says_so_unless_it_is_paused() -> None:
    model = net()
    optimiser = sgd(model)
    constraint = MaxGain(model).attach(optimiser)
    with constraint.paused():
        optimiser.step()
    with pytest.raises(NotMeasuredError, match=r"none of the 2 layers was measured.*paused\(\)"):
        optimiser.step()
