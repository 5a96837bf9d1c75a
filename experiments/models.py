"""Which models and ways of training the constraint was tried with, and what held: the tables of docs/models.md.

    pip install 'maxgain[transformers]' monai peft
    pip install --no-deps timm              # torchvision need not be there
    python experiments/models.py            # prints the tables
    python experiments/models.py --write    # and puts them into docs/models.md

Every model has random weights, and all of them together take some minutes on two cores. Of every model:

1. A constraint is made. Where one of its layers is refused, the advice in the error is followed: it is excluded.
2. Each layer is bounded by half of the gain that it shows at first, so that every bound binds, and ten steps are taken.
3. Of every layer the weight is halved, and its gain on the same input is compared with the one before.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import training_ways
from model_families import FAMILIES, Batch, Family
from torch import Tensor, nn

from maxgain import MaxGain
from maxgain.distributed import whole_weights
from maxgain.errors import MeasurementWarning, UnsupportedLayerError
from maxgain.layers import FoundLayer
from maxgain.observe import layer_gains

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
STEPS = 10
ROUNDING = 1e-5
BEYOND_REACH = 1e30
"""A bound that no gain exceeds; layers without any are measured, and not tried as those are that may be divided."""


@dataclass
class Held:
    """What was seen of one model."""

    layers: int
    """How many have a bound."""
    share: float
    """Of the trained entries of matrices, how many belong to those."""
    excess: float
    """The largest gain over its bound, after the last step."""
    halved: int
    """Of how many layers half the weight gave half the gain."""
    told: list[str] = field(default_factory=list)
    """What was refused or warned of."""


def output_of(result: Any) -> Tensor:
    """The tensor to make a loss of."""
    while not isinstance(result, Tensor):
        result = next(iter(result.values())) if isinstance(result, Mapping) else result[0]
    return result


def run(model: nn.Module, batch: Batch) -> Tensor:
    torch.manual_seed(1)  # of dropout, and of depths that are drawn
    return output_of(model(**batch) if isinstance(batch, dict) else model(batch))


def first_gains(model: nn.Module, batch: Batch) -> tuple[dict[str, float], list[str], list[str]]:
    """The gains of the layers that can be used, which cannot be, and what was said of those."""
    exclude, told = list[str](), list[str]()
    while True:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", MeasurementWarning)
                constraint = MaxGain(model, BEYOND_REACH, exclude=exclude)
                try:
                    run(model, batch).float().square().mean().backward()
                    constraint.step()
                finally:
                    constraint.detach()
            told += [str(one.message) for one in caught if one.category is MeasurementWarning]
            return constraint.gains, exclude, told
        except UnsupportedLayerError as error:
            told.append(str(error))
            exclude += advised(str(error))


def advised(said: str) -> list[str]:
    """The layers that an error tells to exclude."""
    found = re.search(r"exclude=(\[.*?\]|'[^']*')", said)
    assert found is not None, said
    names = ast.literal_eval(found[1])
    return [names] if isinstance(names, str) else names


def train(model: nn.Module, batch: Batch, constraint: MaxGain) -> float:
    """Ten steps; the largest gain over its bound that one more forward shows."""
    optimiser = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    constraint.attach(optimiser)
    for _ in range(STEPS):
        optimiser.zero_grad()
        run(model, batch).float().square().mean().backward()
        optimiser.step()
    run(model, batch)
    constraint.step()
    frozen = {layer.name for layer in constraint._layers if not layer.weight.requires_grad}
    return max(gain / constraint.bounds[name] for name, gain in constraint.gains.items() if name not in frozen)


def half_gains(model: nn.Module, batch: Batch, layers: Iterable[FoundLayer]) -> dict[str, float]:
    """Of every layer that runs, its largest gain with half its weight, over the one with its weight, on one input."""
    ratios: dict[str, float] = {}

    def look(layer: FoundLayer) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if layer.name in ratios:
                return
            x = args[0] if args else next(iter(kwargs.values()))
            weight, bias = layer.weight.detach().clone(), module._parameters.get("bias")
            # Next to a bias that is a million times larger, as those of gMLP's gates, Wx would be lost in rounding.
            instead = {} if bias is None else {"bias": torch.zeros_like(bias)}
            with torch.no_grad(), whole_weights(module, instead):
                whole = layer_gains(layer, x, module.forward(*args, **kwargs), 2.0, "auto").max()
                layer.weight.data.div_(2)
                half = layer_gains(layer, x, module.forward(*args, **kwargs), 2.0, "auto").max()
                layer.weight.data.copy_(weight)
            ratios[layer.name] = float(half / whole) if whole else 0.5

        return layer.module.register_forward_hook(hook, with_kwargs=True)

    handles = [look(layer) for layer in layers]
    model.eval()
    run(model, batch)
    for handle in handles:
        handle.remove()
    return ratios


def bounded_share(model: nn.Module, layers: Iterable[FoundLayer]) -> float:
    """Of the trained entries of matrices that multiply something, how many have a bound."""
    rows = {id(p) for one in model.modules() if isinstance(one, nn.Embedding) for p in one.parameters(recurse=False)}
    bounded = {id(layer.weight) for layer in layers}
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1 and id(p) not in rows - bounded]
    return sum(p.numel() for p in matrices if id(p) in bounded) / max(1, sum(p.numel() for p in matrices))


def tried(family: Family) -> Held:
    """The three things above."""
    torch.manual_seed(0)
    model, batch = family.make()
    model.train()
    gains, exclude, told = first_gains(model, batch)
    gamma = {**{name: gain / 2 for name, gain in gains.items() if gain > 0}, "*": math.inf}
    exclude += [name for name, gain in gains.items() if math.isnan(gain)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeasurementWarning)  # all has been said
        constraint = MaxGain(model, gamma, exclude=exclude)
        excess = train(model, batch, constraint)
    layers = constraint._layers
    constraint.detach()
    ratios = half_gains(model, batch, layers)
    halved = sum(abs(2 * ratio - 1) < ROUNDING for ratio in ratios.values())
    return Held(len(layers), bounded_share(model, layers), excess, halved, told)


# The tables.


def shortly(told: list[str]) -> str:
    """What was refused or warned of, in one cell of a table."""
    parts: dict[str, int] = {}
    for said in told:
        if refused := re.match(r"layer '.*?' \((\w+)\) cannot be \w+: (.*?)\. (?:Neither|Leave)", said):
            reason = re.sub(r"(, and|,)? (so|which|\().*", "", refused[2])
            key = f"{{}} {refused[1]} refused: {reason}"
            parts[key] = parts.get(key, 0) + len(advised(said))
        elif said.startswith("not measured by the first step"):
            key = "{} layers named: not measured, because the model uses their weights without calling them"
            parts[key] = len(re.findall(r"'[^']+'", said.partition(". ")[0]))
        elif unknown := re.match(r"(\d+)% .*? not known: (.*?)\. register", said):
            kinds = dict.fromkeys(name.rpartition(".")[2] for name in re.findall(r"'([^']+)'", unknown[2]))
            key = f"named as without a bound, {unknown[1]} %: {', '.join(f'`{kind}`' for kind in kinds)}"
            parts[key] = 0
        elif said.startswith("LoRA"):
            parts["named: the bounds are those of A and B, not of W + BA"] = 0
        else:
            parts[said] = 0
    return "; ".join(key.format(count) for key, count in parts.items())


def model_row(family: Family, held: Held) -> str:
    name = f"{family.name} ({family.remark})" if family.remark else family.name
    halved = "all" if held.halved == held.layers else f"{held.halved} of {held.layers}"
    share = f"{100 * held.share:.0f} %"
    cells = (name, family.package, held.layers, share, halved, f"{held.excess:.2f}", shortly(held.told))
    return f"| {' | '.join(map(str, cells))} |"


def way_row(name: str, found: float | str) -> str:
    return (
        f"| {name} | {found:.2f} | |"
        if isinstance(found, float)
        else f"| {name} | | refused: {first_sentence(found)} |"
    )


def first_sentence(said: str) -> str:
    return re.split(r"\. (?:Neither|Leave)", said)[0] + "."


def tables(only: list[str]) -> dict[str, list[str]]:
    """The rows of both tables, printed as they come."""
    rows: dict[str, list[str]] = {"models": [], "ways": []}
    for family in FAMILIES:
        if not only or family.name in only:
            rows["models"].append(model_row(family, tried(family)))
            print(rows["models"][-1], flush=True)
    for name, way in training_ways.WAYS.items():
        if not only or name in only:
            rows["ways"].append(way_row(name, training_ways.tried(way)))
            print(rows["ways"][-1], flush=True)
    return rows


def filled_in(page: str, rows: dict[str, list[str]]) -> str:
    """The page with these rows in its tables."""
    for name, lines in rows.items():
        pattern = rf"(<!-- {name} -->\n\n(?:\|.*\n){{2}})(?:\|.*\n)*"
        page = re.sub(pattern, lambda found, lines=lines: found[1] + "".join(f"{line}\n" for line in lines), page)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/models.md")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these rows alone")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write takes all rows")
    torch.set_num_threads(1)  # the models are too small for more
    rows = tables(options.only)
    if options.write:
        PAGE.write_text(filled_in(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
