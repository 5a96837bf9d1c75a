"""The study in a few lines of Python: train, tune and compare on data and networks of one's own.

    from maxgain.study import api

    data = api.dataset("mine", train=(images, labels), validation=(...), test=(...))
    comparison = api.compare(data, ["none", "maxgain=2"], network=my_network, out="compare-mine", seeds=5)
    print(comparison)
    api.page("compare-mine", "report.html")

Everything is recorded as the command line records it, so `maxgain report` makes a page of it too, and the same call
trains nothing that is recorded already. Runs follow each other in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import maxgain
from maxgain.errors import DataError, RecipeError, RunError

from .comparing import jobs as work
from .comparing import records, sentences
from .comparing.comparison import Comparison
from .comparing.comparison import compare as answer
from .comparing.question import Question, against, remember
from .comparing.tuning_rule import BUDGET, RULE, Grid, Trial, best, dimensions, points, refuse_unused, within_budget
from .data.splits import Dataset, Split
from .files import write_json
from .locks import alone_in
from .models import NETWORKS
from .place import Place
from .recipes import Recipe, to_json
from .regularisers import filled, parse
from .report import page as pages
from .runs import perform
from .schema import Result, score

Network = str | Callable[[tuple[int, int, int], int], nn.Module]
"""A name that 'maxgain list networks' shows, or a function from the images' shape and the number of classes."""

__all__ = ["compare", "dataset", "page", "train", "tune"]


def dataset(
    name: str,
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: Sequence[str] | None = None,
) -> Dataset:
    """A data set of one's own: images (N, C, H, W) as bytes from 0 to 255, and labels (N) from 0 on.

    Args:
        name: What it is called in records and on pages.
        train: What networks are trained on.
        validation: What numbers are chosen on; final runs are trained on it too.
        test: What runs are scored on, and nothing is chosen on.
        classes: The names of the classes; without them they are numbered.
    """
    parts = {"train": train, "validation": validation, "test": test}
    for part, (images, labels) in parts.items():
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise DataError(f"the {part} images must be bytes (torch.uint8) of shape (N, C, H, W), not "
                            f"{images.dtype} of shape {tuple(images.shape)}.")  # fmt: skip
        if len(images) != len(labels):
            raise DataError(f"the {part} part has {len(images)} images and {len(labels)} labels.")
    most = max(int(labels.max()) for _, labels in parts.values())
    named = tuple(map(str, range(most + 1))) if classes is None else tuple(classes)
    if most >= len(named):
        raise DataError(f"there is a label {most}, but only {len(named)} classes.")
    one, two, three = (Split(images.contiguous(), labels.long()) for images, labels in parts.values())
    return Dataset(name, train=one, validation=two, test=three, classes=named)


def train(
    data: Dataset,
    regulariser: str = "maxgain",
    *,
    network: Network = "mlp",
    out: str | Path,
    device: str = "auto",
    **settings: Any,
) -> Result:
    """Train one network, and return what `maxgain train` writes into result.json.

    Args:
        data: What to train on: see `dataset`.
        regulariser: As on the command line: maxgain=2+dropout.
        network: The name of a network, or a function that makes one.
        out: The run's folder; a run in it goes on where it was.
        device: cpu, cuda, or auto.
        **settings: Fields of a recipe: epochs, learning_rate, batch_size, optimiser, seed, ...
    """
    with _known(network) as name:
        recipe = _recipe(data, name, regulariser, settings)
        return perform(recipe, Place(Path(out), device=device), data, resume=True)


def tune(
    data: Dataset,
    regulariser: str = "maxgain",
    *,
    grid: Sequence[str] = (),
    network: Network = "mlp",
    out: str | Path,
    device: str = "auto",
    **settings: Any,
) -> dict[str, Any]:
    """Choose the numbers that a regulariser leaves open on the validation part, and return what was chosen.

    Args:
        data: What to train on: see `dataset`. Its test part is not looked at.
        regulariser: What to tune: maxgain, or maxgain+dropout.
        grid: Values to try, as gamma=1.25:3:0.25; without it, a few over the usual range.
        network: The name of a network, or a function that makes one.
        out: The search's folder.
        device: cpu, cuda, or auto.
        **settings: Fields of a recipe: epochs, learning_rate, batch_size, optimiser, seed, ...
    """
    grids = [Grid.parsed(text) for text in grid]
    refuse_unused(grids, [regulariser])
    space = within_budget(dimensions(regulariser, grids), BUDGET)
    if not space:
        raise RecipeError(f"{regulariser!r} leaves no number open to choose.")
    folder, curve = Path(out), []
    with _known(network) as name:
        recipe = _recipe(data, name, regulariser, settings)
        for point in points(space):
            tried = replace(recipe, regulariser=filled(regulariser, point))
            place = Place(folder, device=device, has_test=False).of(tried, data.without_test().fingerprint)
            curve.append(_trial(tried, place, data.without_test()) | {"values": point})
    chosen = best(curve)
    write_json(folder / "curve.json", curve)
    if chosen is None:
        raise RunError(f"no trial came to an end, so nothing is chosen; {folder / 'curve.json'} says why.")
    tuned = {
        "recipe": data.name,
        "asked": regulariser,
        "regulariser": filled(regulariser, chosen["values"]),
        "rule": RULE,
        "config": to_json(replace(recipe, regulariser=filled(regulariser, chosen["values"]))),
    } | chosen
    write_json(folder / "tuned.json", tuned)
    return tuned


def compare(
    data: Dataset,
    regularisers: Sequence[str],
    *,
    network: Network = "mlp",
    out: str | Path,
    seeds: int = 5,
    baseline: str | None = None,
    device: str = "auto",
    **settings: Any,
) -> Comparison:
    """Train every regulariser with every seed, and test the paired differences of their test accuracies.

    Args:
        data: What to train on: see `dataset`.
        regularisers: The rows, as on the command line.
        network: The name of a network, or a function that makes one.
        out: The comparison's folder; what is recorded there is not trained again.
        seeds: How many, from `seed` on.
        baseline: What the others are tested against: the first, unless it is said.
        device: cpu, cuda, or auto.
        **settings: Fields of a recipe: epochs, learning_rate, batch_size, optimiser, seed, ...
    """
    for regulariser in regularisers:
        parse(regulariser)
    against_what = baseline or next(iter(regularisers), "")
    if against_what not in regularisers:
        raise RecipeError(f"the baseline {against_what!r} is not one of {', '.join(regularisers)}.")
    place = Place(Path(out), device=device)
    with _known(network) as name, alone_in(place.folder, "comparison.json"):
        recipe = _recipe(data, name, regularisers[0], {"train_on": "train+validation"} | settings)
        pairing = work.seeds(recipe, seeds)
        jobs = [replace(job, fingerprint=data.fingerprint) for job in work.plan(recipe, regularisers, pairing)]
        question = Question(
            recipe=recipe.name,
            dataset=data.name,
            over=pairing.over,
            rows={row: tuple(job.planned for job in jobs if job.row == row) for row in regularisers},
            contrasts=against(against_what, list(regularisers)),
            train_on=recipe.train_on,
        )
        remember(place.folder, question)
        for job in work.missing(jobs, records.read(place.results)):
            work.run_recorded(job, place, data)
        comparison = answer(question, records.read(place.results))
        content = {"maxgain": maxgain.__version__} | sentences.to_json(comparison)
        write_json(place.folder / "comparison.json", content)
    return comparison


def page(folder: str | Path, out: str | Path = "report.html") -> Path:
    """Make one page of a run, a search or a comparison, and return where it is.

    Args:
        folder: What `out` named in one of the functions above, or a folder that holds several of such.
        out: The page.
    """
    pages.write(Path(folder), Path(out))
    return Path(out)


def _recipe(data: Dataset, network: str, regulariser: str, settings: dict[str, Any]) -> Recipe:
    usual: dict[str, Any] = {"optimiser": "adam", "learning_rate": 1e-3, "epochs": 30, "batch_size": 32}
    try:
        return Recipe(name=data.name, dataset=data.name, network=network, regulariser=regulariser, **usual | settings)
    except TypeError as error:
        raise RecipeError(f"a recipe cannot be made of these settings: {error}.") from error


@contextmanager
def _known(network: Network) -> Iterator[str]:
    """The network's name; a function is in the table of networks for as long as it is needed."""
    if isinstance(network, str):
        yield network
        return

    def build(shape: Any, classes: int, *, batchnorm: bool = False, dropout: Any = None) -> nn.Module:
        if batchnorm or dropout:
            raise RecipeError("a network of your own has the batch norm and the dropout that it has: leave them out.")
        return network(shape, classes)

    name = getattr(network, "__name__", type(network).__name__)
    if name in NETWORKS:
        raise RecipeError(f"there is a network {name!r} already: give yours another name.")
    NETWORKS[name] = build  # type: ignore[assignment]
    try:
        yield name
    finally:
        del NETWORKS[name]


def _trial(recipe: Recipe, place: Place, data: Dataset) -> Trial:
    try:
        result = perform(recipe, place, data, resume=True)
    except RunError as error:
        return {"status": "failed", "error": str(error)}
    names = (f"{part}_{what}" for part in ("train", "validation") for what in ("accuracy", "loss"))
    return {"status": "complete", "epochs": recipe.epochs} | {name: score(result, name) for name in names}
