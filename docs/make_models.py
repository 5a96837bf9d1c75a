"""Try MaxGain on other people's models, and fill in the table of docs/models.md: `python docs/make_models.py`.

Needs maxgain[transformers], monai, peft and timm; a minute on one core. Every model has random weights. Each layer gets
half of its first gain as its bound, so that every bound binds; then ten steps are taken.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maxgain import MaxGain
from maxgain.errors import MeasurementWarning
from maxgain.layers import uncovered

DOCS = Path(__file__).parent
RECORD, PAGE = DOCS / "figures" / "models.json", DOCS / "models.md"
STEPS = 10
FREE = 1e30
"""A bound that no gain exceeds."""


def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.manual_seed(1)  # of dropout
    result = model(**batch) if isinstance(batch, dict) else model(batch)
    while not isinstance(result, Tensor):
        result = next(iter(result.values())) if isinstance(result, Mapping) else result[0]
    result.float().square().mean().backward()
    optimizer.step()


def tried(family: Any) -> dict[str, Any]:
    """What came of one model: its bounded layers, the largest gain over its bound after ten steps, the warnings."""
    torch.manual_seed(0)
    model, batch = family.make()
    optimizer = torch.optim.SGD([p for p in model.train().parameters() if p.requires_grad], lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeasurementWarning)
        constraint = MaxGain(model, FREE).attach(optimizer)
        step(model, batch, optimizer)
        gains = {name: gain for name, gain in constraint.gains.items() if not math.isnan(gain)}
        step(model, batch, optimizer)  # after which everything has been said
    constraint.gamma = bounds = {name: gain / 2 for name, gain in gains.items() if gain > 0} | {"*": math.inf}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeasurementWarning)
        for _ in range(STEPS + 1):
            step(model, batch, optimizer)
    trained = {name for name in bounds if name != "*" and model.get_submodule(name).weight.requires_grad}
    measured = [layer for layer in constraint._slots if layer.name in gains]
    return {
        "model": family.name,
        "remark": family.remark,
        "package": family.package,
        "layers": len(measured),
        "bounded": 1 - uncovered(model, measured, constraint.skipped, ())[0],
        "gain over bound": max(constraint.gains[name] / bounds[name] for name in trained),
        "warnings": [str(one.message) for one in caught if one.category is MeasurementWarning],
    }


def table(found: list[dict[str, Any]]) -> str:
    """A line for each package's models that are bounded whole, and one for each other model."""
    whole: dict[str, list[dict[str, Any]]] = {}
    rows, others = [], []
    for one in found:
        if one["bounded"] > 0.985:
            whole.setdefault(one["package"], []).append(one)
            continue
        remark = f" ({one['remark']})" if one["remark"] else ""
        others.append((f"{one['model']}{remark}", one["layers"], f"{one['bounded']:.0%}", one["gain over bound"]))
    for package, models in whole.items():
        names = "; ".join(one["model"] for one in models)
        layers = " to ".join(dict.fromkeys(str(pick(one["layers"] for one in models)) for pick in (min, max)))
        lowest = f"{min(one['bounded'] for one in models):.0%}"
        rows.append((f"{package}: {names}", layers, lowest, max(one["gain over bound"] for one in models)))
    rows += others
    return "".join(f"| {name} | {layers} | {bounded} | {excess:.2f} |\n" for name, layers, bounded, excess in rows)


def main() -> None:
    sys.path.insert(0, str(DOCS.parent / "experiments"))
    from model_families import FAMILIES

    torch.set_num_threads(1)  # the models are too small for more
    found = []
    for family in FAMILIES:
        found.append(tried(family))
        print(family.name, flush=True)
    RECORD.write_text(json.dumps({"torch": torch.__version__, "models": found}, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    place = re.compile(r"(<!-- models -->\n\n(?:\|.*\n){2})(?:\|.*\n)*")
    PAGE.write_text(place.sub(lambda head: head[1] + table(found), page), encoding="utf-8")


if __name__ == "__main__":
    main()
