"""maxgain inspect: what each layer did to the data, beside what it could do to any input."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import maxgain
from maxgain import operator_norms, sampled_slope
from maxgain.errors import MaxGainError, RunError, UnsupportedLayerError
from maxgain.measure import evaluating

from .. import memory
from ..data.splits import Split
from ..evaluate import batches, gains, largest
from ..files import expect_ours, write_json
from ..report import figures
from ..run_files import open_run
from ..runs import Place, chosen_device
from ..tables import Column, Table
from ..training import to_float
from ..wording import first_line
from .terminal import Common, DataFolder, Screen, typed

EXAMPLES = {
    "maxgain inspect runs/digits-maxgain=2-seed0": "the layers of a run that 'maxgain train' has finished",
    "maxgain inspect --model my_model:make --input 3x32x32": "a model of your own, which my_model.py's make() returns",
    "maxgain inspect --model my_model:make --input 16x64 --exclude '*.self_attn'": "less what cannot be measured",
}

NORMS = (1.0, 2.0, math.inf)
LARGEST_INPUT = 2**26
"""Numbers in one input: more than the largest pictures have."""
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
    """where the data sets are (default: $MAXGAIN_DATA, or a cache folder)"""
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
    folder = options.out or options.run or Path()
    written = [folder / f"inspect.{kind}" for kind in ("png", "svg", "json")]
    subject = _from_run(options) if options.run is not None else _from_model(options)
    expect_ours(*written)
    _refuse_lost_weights(subject)
    try:
        content = inspected(subject)
    except UnsupportedLayerError as error:
        raise UnsupportedLayerError(_with_flags(str(error))) from error
    screen.show(layer_table(subject.title, content))
    for line in network_lines(content):
        screen.show(line)
    peaks = {part: largest(rows) for part, rows in content["gains"].items()}
    finite = subject.bound if subject.bound is not None and math.isfinite(subject.bound) else None
    drawn = figures.gains_beside_norms(content["norms"]["2"], peaks, title=subject.title, bound=finite)
    figures.save(drawn, folder, "inspect")
    write_json(written[-1], {"maxgain": maxgain.__version__} | content)
    steps = {} if options.run is None else {typed("gains", options.run): "the whole distribution of the gains, drawn"}
    screen.end(written, steps)
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
    """One row per layer. The ratio is of the largest gain to the operator norm of the same p, where that is known."""
    gains, norms, bounds, layers = content["gains"], content["norms"], content["bounds"], content["norms"]["2"]
    own = norms.get(f"{content['p']:g}")
    columns: list[tuple[Column, list[float]]] = []
    for part, rows in gains.items():
        columns.append((Column(f"{part} max", spare=0 if part == "train" else 1), [rows[name][-1] for name in layers]))
        columns.append((Column(f"{part} median", spare=3), [rows[name][2] for name in layers]))
    for p, norm in norms.items():
        subscript = "∞" if p == "inf" else p
        columns.append((Column(f"‖W‖{subscript}", spare=0 if norm is own else 4), [norm[name] for name in layers]))
    if own and gains:
        peaks = {name: max(rows[name][-1] for rows in gains.values()) for name in layers}
        columns.append((Column("gain / norm", spare=2), [peaks[name] / own[name] for name in layers]))
    if bounds:
        columns.append((Column("bound", spare=1), [bounds[name] for name in layers]))
    measured = f"gains (p = {content['p']:g}) and " if gains else ""
    return Table(
        f"{title}: {measured}operator norms",
        (Column("layer"), *(column for column, _ in columns)),
        tuple(zip(layers, *(values for _, values in columns), strict=True)),
    )


def network_lines(content: dict[str, Any]) -> list[str]:
    """The whole network in sentences that say which number is a lower bound, which an estimate, which an upper one."""
    p = f"{content['p']:g}"
    below = "A measured gain is a lower bound of its layer's operator norm: other inputs may be amplified more."
    lines = [*([below] if content["gains"] else []), f"The whole network, p = {p}:"]
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
    opened = open_run(Place(options.run, options.data, options.device))
    example = to_float(opened.parts["train"].images[:1])
    return Subject(opened.title, opened.model, example, opened.parts, opened.recipe.p, opened.recipe.gamma)


def _from_model(options: Options) -> Subject:
    if not options.model or not options.input:
        raise RunError("inspect needs a run's folder, or --model module:function and --input 3x32x32.")
    device = chosen_device(options.device)
    shape = _shape(options.input)
    model = _made(options.model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise RunError(f"{options.model} has weights on the device meta, which have no numbers.")
    model = model.to(device)
    kinds = (weight.dtype for weight in model.parameters() if weight.is_floating_point())
    example = torch.zeros(1, *shape, device=device, dtype=next(kinds, torch.float32))
    try:
        with memory.in_words(), torch.no_grad(), evaluating(model):
            model(example)
    except MaxGainError:
        raise
    except Exception as error:  # a model of the user's own raises what it likes
        raise RunError(f"{options.model} takes no input of the shape {options.input}: {first_line(error)}.") from error
    return Subject(options.model, model, example, {}, exclude=options.exclude)


def _with_flags(sentence: str) -> str:
    """The library's advice for somebody who types: --exclude a b, where Python has exclude=['a', 'b']."""

    def typed_out(found: re.Match[str]) -> str:
        names = ast.literal_eval(found[1])
        return f"--exclude {shlex.join([names] if isinstance(names, str) else names)}"

    return re.sub(r"exclude=(\[[^]]*\]|'[^']*')", typed_out, sentence)


def _shape(text: str) -> list[int]:
    """The shape that a text like 3x32x32 means."""
    try:
        shape = [int(size) for size in text.lower().split("x")]
    except ValueError:
        shape = []
    if not shape or min(shape) < 1:
        raise RunError(f"--input {text!r} is not a shape like 3x32x32.")
    if math.prod(shape) > LARGEST_INPUT:
        raise RunError(f"--input {text!r} has {math.prod(shape):,} numbers, and {LARGEST_INPUT:,} are the most.")
    return shape


def _refuse_lost_weights(subject: Subject) -> None:
    """Refuse a model of whose layers nothing could be said."""
    lost = [name for name, weight in subject.model.named_parameters() if not weight.isfinite().all()]
    if lost:
        raise RunError(f"{subject.title} has weights that are not finite numbers, in {lost[0]!r}.")


def _made(path: str) -> nn.Module:
    """The model that a function of the user's returns; modules are also looked for in the current folder."""
    module_name, _, function_name = path.partition(":")
    sys.path.insert(0, "")
    try:
        with memory.in_words():
            make = getattr(importlib.import_module(module_name), function_name)
            if inspect.isbuiltin(make):  # such as os.abort, which would end this process without a word
                raise RunError(f"--model {path!r} is a function of Python's own, which makes no model.")
            model = make()
    except MaxGainError:
        raise
    except (Exception, SystemExit) as error:  # code of the user's own raises what it likes
        reason = first_line(error)
        must = "it must be module:function, such as my_model:make for the function make in my_model.py"
        raise RunError(f"--model {path!r} cannot be made: {reason}; {must}.") from error
    finally:
        with suppress(ValueError):
            sys.path.remove("")
    if not isinstance(model, nn.Module):
        raise RunError(f"--model {path!r} gives a {type(model).__name__} and not a torch.nn.Module.")
    return model
