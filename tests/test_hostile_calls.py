"""Calls of the library with senseless arguments: each is refused by an error of ours, in a sentence, or does no harm.

Every public call is made with one argument after another replaced by each hostile value. What Python itself says of a
call that does not fit a signature is Python's own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from maxgain import (
    Lipschitz,
    MaxGain,
    MaxNorm,
    WeightClip,
    functional,
    measure_gains,
    operator_norms,
    sampled_slope,
    study,
)
from maxgain.errors import MaxGainError
from maxgain.monitor import Monitor

NUMBERS = (math.nan, math.inf, -math.inf, -1, 0, -0.0, 1e-320, 1e308, 10**400, True, Decimal("nan"), Fraction(1, 3), 1j)
TENSORS = (
    torch.tensor(math.nan),
    torch.empty(0),
    torch.empty(3, 0),
    torch.zeros(2, 4, dtype=torch.complex64),
    torch.full((2, 4), math.nan),
    torch.zeros(2, 4, device="meta"),
    torch.zeros(2, 4, dtype=torch.int8),
    torch.zeros(2, 3, 4, 5, 6, 7),
    torch.zeros(2, 5),
)
STRANGE = (
    None, "", "abc", "2", "*", "[", "é\udcff", b"x", [], [None], [""], (), {}, {"*": None}, {None: 1}, {"*": math.nan},
    set(), object(), object, print, len, iter(()), range(3), ..., NotImplemented, np.float64(math.nan), np.zeros(0),
    np.zeros((2, 4)), np.array("x"), Path("nowhere"), torch.float32, torch.device("meta"), nn.Identity(),
    nn.Linear, nn.Linear(2, 2),
)  # fmt: skip
HOSTILE = (*NUMBERS, *TENSORS, *STRANGE)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))


def images() -> torch.Tensor:
    return torch.randn(2, 1, 4, 4)


def trained(constraint: Any) -> Any:
    """A step, for what is noticed no sooner."""
    if not isinstance(constraint.model, nn.Sequential):
        return None
    optimizer = torch.optim.SGD(constraint.model.parameters(), lr=0.1)
    constraint.attach(optimizer)
    constraint.model(images()).square().mean().backward()
    optimizer.step()
    return constraint.gains, constraint.scales


def constraint() -> Any:
    return MaxGain(network())


def one_entry(value: Any) -> None:
    mine = constraint()
    state = mine.state_dict()
    mine.load_state_dict(state | {next(iter(state)): value})


def logged(constraint: Any, step: Any, **options: Any) -> None:
    Monitor(constraint, **options).log(step)


def part() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.arange(10) % 2


def mine() -> Any:
    return study.dataset("mine", part(), part())


@dataclass(frozen=True)
class Call:
    """Something that users call, and arguments with which it works."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]

    def hostile(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The call's arguments with one of them made senseless, and which that is."""
        for name in self.arguments():
            for value in HOSTILE:
                yield name, self.arguments() | {name: value}


def trained_with(kind: type) -> Callable[..., Any]:
    return lambda **arguments: trained(kind(**arguments))


GLOBS = {"include": None, "exclude": ()}
OPTIONS = {"p": 2.0, "instance": "auto", "measure": "stale", "strength": "full", "every": 1, "process_group": None}
EFFORT = {"pairs": 10, "neighbours": 2, "points": 2, "iterations": 2, "seed": 0}
WATCHING = {"every": 1, "factor": 2.0, "window": 100, "on_alarm": print, "step": 0}
STUDY = {"network": "mlp", "out": "run", "device": "cpu", "epochs": 1, "batch_size": 2, "learning_rate": 0.1, "seed": 0}
COMPARE = {
    "folds": None, "seeds": 1, "baseline": None, "contrasts": (), "tuned": False, "budget": None, "grid": (),
    "rope": None, "decide_by": "paired", "hold_out": False,
}  # fmt: skip
CALLS = [
    Call("MaxGain", trained_with(MaxGain), lambda: {"model": network(), "gamma": 1.0, **OPTIONS, **GLOBS}),
    Call(
        "Lipschitz",
        trained_with(Lipschitz),
        lambda: {"model": network(), "bound": 1.0, "p": 2.0, "iterations": 1, "process_group": None, **GLOBS},
    ),
    Call("MaxNorm", trained_with(MaxNorm), lambda: {"model": network(), "bound": 1.0, **GLOBS}),
    Call("WeightClip", trained_with(WeightClip), lambda: {"model": network(), "bound": 1.0, **GLOBS}),
    Call("attach", lambda optimizer: constraint().attach(optimizer), lambda: {"optimizer": None}),
    Call("load_state_dict", lambda state: constraint().load_state_dict(state), lambda: {"state": {}}),
    Call("an entry of a state", one_entry, lambda: {"value": None}),
    Call(
        "measure_gains",
        measure_gains,
        lambda: {"model": network(), "batches": [images()], "p": 2.0, "instance": "auto", **GLOBS},
    ),
    Call("a batch", lambda batch: measure_gains(network(), [batch]), lambda: {"batch": images()}),
    Call(
        "operator_norms",
        partial(operator_norms, max_iterations=10),
        lambda: {"model": network(), "example_input": images(), "p": 2.0, "tolerance": 1e-2, "start": None, **GLOBS},
    ),
    Call("max_iterations", partial(operator_norms, network(), images()), lambda: {"max_iterations": 10}),
    Call("sampled_slope", sampled_slope, lambda: {"model": network(), "batches": [images()], "p": 2.0, **EFFORT}),
    Call("Monitor", logged, lambda: {"constraint": constraint(), **WATCHING}),
    Call("a writer", lambda writer: Monitor(constraint(), writer), lambda: {"writer": None}),
    Call(
        "gain", functional.gain, lambda: {"z": torch.randn(2, 4), "x": torch.randn(2, 4), "p": 2.0, "instance_dims": 1}
    ),
    Call("project_", functional.project_, lambda: {"weight": torch.randn(2, 4), "gain": 2.0, "gamma": 1.0}),
    Call("dataset", study.dataset, lambda: {"name": "mine", "train": part(), "test": part(), "validation": part()}),
    Call("classes", lambda classes: study.dataset("mine", part(), part(), classes=classes), lambda: {"classes": None}),
    Call("train", study.train, lambda: {"data": mine(), "regulariser": "maxgain=2", **STUDY}),
    Call(
        "tune",
        study.tune,
        lambda: {"data": mine(), "regulariser": "maxgain", "grid": "gamma=1:1:1", "trials": None, **STUDY},
    ),
    Call("compare", study.compare, lambda: {"data": mine(), "regularisers": ["none"], **COMPARE, **STUDY}),
    Call("page", study.page, lambda: {"folder": "nowhere", "out": "nowhere/page.html"}),
]


def refusals(call: Call) -> tuple[int, list[str]]:
    """How many calls there were, and what was raised that is not ours."""
    wrong, count = [], 0
    for name, arguments in call.hostile():
        count += 1
        shown = f"{call.name}({name}={arguments[name]!r:.60})"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call.function(**arguments)
        except MaxGainError as error:
            if not str(error).strip().endswith("."):
                wrong.append(f"{shown}: no sentence: {error}")
        except Exception as error:
            wrong.append(f"{shown}: {type(error).__name__}: {error!s:.100}")
    return count, wrong


REFUSED = [
    (MaxGain, {"gamma": value}) for value in (None, "2", 0, -1, math.nan, {}, {"*": 0}, {"nothing": 1.0})
] + [
    (MaxGain, {"p": value}) for value in (0.5, "2", None, math.nan)
] + [
    (MaxGain, {"every": value}) for value in (0, 2.5, True, 10**400)
] + [
    (MaxGain, {"instance": "row"}), (MaxGain, {"measure": None}), (MaxGain, {"strength": ""}),
    (MaxGain, {"include": "nothing"}), (MaxGain, {"exclude": [1]}), (MaxGain, {"include": []}),
    (Lipschitz, {"bound": 1.0, "iterations": True}), (MaxNorm, {"bound": -math.inf}), (WeightClip, {"bound": math.nan}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), REFUSED, ids=str)
def test_what_could_only_be_a_mistake_is_refused_when_the_constraint_is_made(kind, options) -> None:
    with pytest.raises(MaxGainError, match=r"\.$"):
        kind(network(), **options)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_senseless_arguments_are_refused_in_a_sentence_of_ours(call, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    count, wrong = refusals(call)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
