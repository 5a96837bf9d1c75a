"""maxgain inspect: what each layer did to the data, beside what it could do to any input."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.table import Table
from torch import Tensor, nn

from maxgain import operator_norms, sampled_slope
from maxgain.errors import RunError
from maxgain.measure import evaluating

from ..data.splits import Split
from ..evaluate import batches, gains, largest, to_float
from ..files import strict, write_json
from ..regularisers import chosen_for, numbers
from ..report import figures
from ..runs import chosen_device, load_data, load_model, read_config
from ..train import trained_on
from ..wording import clause
from .terminal import Common, DataFolder, Screen

NORMS = (1.0, 2.0, math.inf)
SLOPE_SAMPLE = 200
"""How many training images the network's slope is looked for at."""


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """Show every layer's measured gain beside its operator norms, for a finished run or for a model of your own."""

    run: tyro.conf.Positional[Path | None] = None
    """the folder of a finished run"""
    model: str | None = None
    """instead of a run: module:function, a function of no arguments that returns a model"""
    input: str | None = None
    """with --model: the shape of one input, such as 3x32x32"""
    exclude: tuple[str, ...] = ()
    """with --model: layers to leave out, as patterns over their names, such as '*.self_attn'"""
    data: DataFolder = None
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one"""
    out: Path | None = None
    """where inspect.json and the figure go (default: the run's folder, or here)"""


@dataclass(frozen=True)
class Subject:
    """What is looked at."""

    title: str
    model: nn.Module
    example: Tensor
    parts: dict[str, Split]
    p: float = 2.0
    bound: float | None = None
    exclude: tuple[str, ...] = ()


def run(options: Options, screen: Screen) -> dict[str, Any]:
    """Shows the table, writes inspect.json and a figure."""
    subject = _from_run(options) if options.run is not None else _from_model(options)
    content = inspected(subject)
    screen.show(layer_table(subject.title, content))
    for line in network_lines(content):
        screen.show(line)
    folder = options.out or options.run or Path()
    peaks = {part: largest(rows) for part, rows in content["gains"].items()}
    drawn = figures.gains_beside_norms(content["norms"]["2"], peaks)
    paths = figures.save(drawn, folder, "inspect")
    write_json(folder / "inspect.json", strict(content))
    screen.show(f"written: {', '.join(map(str, [*paths, folder / 'inspect.json']))}")
    return content


def inspected(subject: Subject) -> dict[str, Any]:
    """All there is to know: gains by part, operator norms by p, and what the whole network does."""
    reports = {p: operator_norms(subject.model, subject.example, p=p, exclude=subject.exclude) for p in NORMS}
    measured = {part: gains(subject.model, split, subject.p).quantiles() for part, split in subject.parts.items()}
    content: dict[str, Any] = {
        "p": subject.p,
        "bounds": None if subject.bound is None else dict.fromkeys(reports[2.0].norms, subject.bound),
        "gains": measured,
        "norms": {f"{p:g}": report.norms for p, report in reports.items()},
        "residuals": reports[2.0].residuals,
        "network": {
            f"{p:g}": {"norm_product": report.product, "bound": report.bound, "covers": report.covers}
            for p, report in reports.items()
        },
    }
    if "train" in measured:
        sample = subject.parts["train"].images[:SLOPE_SAMPLE]
        slope = sampled_slope(subject.model, batches(sample), p=subject.p)
        content["slope"] = {
            "random_pairs": slope.random_pairs,
            "neighbours": slope.neighbours,
            "local": slope.local,
            "value": slope.value,
        }
        content["gain_product"] = math.prod(largest(measured["train"]).values())
    return content


def layer_table(title: str, content: dict[str, Any]) -> Table:
    """One row a layer. The ratio is of the largest gain to the operator norm of the same p, where that is known."""
    own = content["norms"].get(f"{content['p']:g}")
    table = Table(title=f"{title}: gains (p = {content['p']:g}) and operator norms")
    table.add_column("layer")
    for part in content["gains"]:
        table.add_column(f"{part} max", justify="right")
        table.add_column(f"{part} median", justify="right")
    for p in content["norms"]:
        table.add_column(f"‖W‖{'∞' if p == 'inf' else p}", justify="right")
    if own and content["gains"]:
        table.add_column("gain / norm", justify="right")
    if content["bounds"]:
        table.add_column("bound", justify="right")
    for name in content["norms"]["2"]:
        cells = [f"{row[name][i]:.4g}" for row in content["gains"].values() for i in (-1, 2)]
        cells += [f"{norms[name]:.4g}" for norms in content["norms"].values()]
        if own and content["gains"]:
            cells.append(f"{max(row[name][-1] for row in content['gains'].values()) / own[name]:.3f}")
        if content["bounds"]:
            cells.append(f"{content['bounds'][name]:g}")
        table.add_row(name, *cells)
    return table


def network_lines(content: dict[str, Any]) -> list[str]:
    """The whole network in sentences that say which number is a lower bound, which an estimate, which an upper one."""
    p = f"{content['p']:g}"
    lines = [
        "A measured gain is a lower bound of its layer's operator norm: other inputs may be amplified more.",
        f"The whole network, p = {p}:",
    ]
    if "slope" in content:
        slope = content["slope"]
        lines += [
            f"  {slope['value']:.4g} is the steepest slope found in the data, a lower bound of the Lipschitz constant "
            f"(random pairs {slope['random_pairs']:.4g}, near neighbours {slope['neighbours']:.4g}, "
            f"local gradients {slope['local']:.4g});",
            f"  {content['gain_product']:.4g} is the product of the layers' largest gains, an estimate and no bound;",
        ]
    whole = content["network"].get(p)
    if whole is None:
        lines.append(f"  operator norms for p = {p} are not known to be tractable.")
        return lines
    lines.append(f"  {whole['norm_product']:.4g} is the product of the layers' operator norms;")
    bound = "" if whole["bound"] is None else f"{whole['bound']:.4g} is an upper bound of the Lipschitz constant: "
    lines.append(f"  {bound}{whole['covers']}")
    return lines


def _from_run(options: Options) -> Subject:
    assert options.run is not None
    if options.model or options.input or options.exclude:
        raise RunError("give a run's folder, or --model with --input and --exclude, not both.")
    recipe = read_config(options.run)
    device = chosen_device(options.device)
    dataset = load_data(recipe, options.data)
    model = load_model(options.run, dataset, device)
    parts = {"train": trained_on(recipe, dataset).to(device), "test": dataset.test.to(device)}
    example = to_float(parts["train"].images[:1])
    gamma = numbers(chosen_for(recipe)).get("maxgain")
    return Subject(f"{recipe.name}, {recipe.regulariser}", model, example, parts, recipe.p, gamma)


def _from_model(options: Options) -> Subject:
    if not options.model or not options.input:
        raise RunError("inspect needs a run's folder, or --model module:function and --input 3x32x32.")
    device = chosen_device(options.device)
    try:
        example = torch.zeros(1, *map(int, options.input.lower().split("x")), device=device)
    except (ValueError, RuntimeError) as error:
        raise RunError(f"--input {options.input!r} is not a shape like 3x32x32.") from error
    model = _made(options.model).to(device)
    try:
        with torch.no_grad(), evaluating(model):
            model(example)
    except RuntimeError as error:
        reason = clause(str(error).splitlines()[0])
        raise RunError(f"{options.model} takes no input of the shape {options.input}: {reason}.") from error
    return Subject(options.model, model, example, {}, exclude=options.exclude)


def _made(path: str) -> nn.Module:
    """The model that a function of the user's returns; modules are also looked for in the current folder."""
    module_name, _, function_name = path.partition(":")
    sys.path.insert(0, "")
    try:
        model = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise RunError(f"--model {path!r} cannot be made: {error}; it must be module:function.") from error
    finally:
        sys.path.remove("")
    if not isinstance(model, nn.Module):
        raise RunError(f"--model {path!r} gives a {type(model).__name__} and not a torch.nn.Module.")
    return model
