"""The study in a few lines of Python: train, tune and compare, on data and networks of your own.

    from maxgain.study import compare, dataset, page

    data = dataset("mine", train=(images, labels), test=(more_images, more_labels))
    comparison = compare(data, ["none", "maxgain=2"], network=my_network, out="compare-mine", folds=5)
    print(comparison)
    page("compare-mine", "report.html")

Everything is recorded as the command line records it, so `maxgain report` makes a page of it too, and the same call
trains nothing that is recorded already. Runs follow each other in this process; one that is stopped by Ctrl-C is saved,
and the same call goes on with it. Errors are those of `maxgain.errors`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from maxgain.errors import MaxGainError, RecipeError
from maxgain.functional import check_count

from .comparing import asking, records, tuned
from .comparing import jobs as work
from .comparing import tune as searching
from .comparing.asking import Asked
from .comparing.comparison import Comparison
from .comparing.engine import InTurn
from .comparing.jobs import Job
from .comparing.question import Analysis
from .comparing.records import Record
from .comparing.tuned import Tuned
from .data.splits import Dataset
from .own import Network, dataset, known
from .reading import converted
from .recipes import Recipe, recipe_named
from .report import page as pages
from .runs import Interrupted, Place, perform
from .schema import Result
from .trained import scores_table
from .wording import clause, counted, unknown

__all__ = ["compare", "dataset", "page", "train", "tune"]

Data = Dataset | str
"""What `dataset` made, or the name of a recipe that 'maxgain list recipes' shows, with the data set that it names."""
Tell = Callable[[str], None]
T = TypeVar("T")
FIXED = {"name", "dataset"}
"""What the data decide."""


class Trained(dict[str, Any]):
    """What result.json holds of a run, which `print` shows as a table of its scores."""

    def __repr__(self) -> str:
        return f"<run of {self['recipe']}, {self['regulariser']}, seed {self['seed']}>"

    def __str__(self) -> str:
        return str(scores_table(cast("Result", self)))

    def _repr_html_(self) -> str:
        return scores_table(cast("Result", self))._repr_html_()


def train(
    data: Data,
    regulariser: str = "maxgain",
    *,
    network: Network | None = None,
    out: str | Path,
    device: str = "auto",
    **settings: Any,
) -> Trained:
    """Train one network; what is returned is what `maxgain train` writes into result.json, and prints as a table.

    Args:
        data: What to train on: see `dataset`; or the name of a recipe, such as digits.
        regulariser: As on the command line: maxgain=2+dropout.
        network: The name of a network, or a function that makes one from an image's shape and the number of classes;
            without it mlp, or the recipe's own.
        out: The run's folder; a run in it goes on where it was.
        device: cpu, cuda, or auto.
        **settings: Fields of a recipe: epochs, learning_rate, batch_size, optimiser, seed, ...
    """
    with _asked_in_python(), _recipe(data, network, regulariser, settings) as recipe:
        place = _place(data, out, device)
        return Trained(perform(recipe, place, place.load_data(recipe), resume=True))


def tune(
    data: Data,
    regulariser: str = "maxgain",
    *,
    grid: str | Sequence[str] = (),
    trials: int | None = None,
    network: Network | None = None,
    out: str | Path,
    device: str = "auto",
    tell: Tell = lambda sentence: None,
    **settings: Any,
) -> Tuned:
    """Choose the numbers that a regulariser leaves open on the validation part; `print` shows what was tried.

    Args:
        data: What to train on: see `dataset`; or the name of a recipe. Its test part is not looked at.
        regulariser: What to tune: maxgain, or maxgain+dropout.
        grid: Values to try, as gamma=1.25:3:0.25; several are multiplied.
        trials: Without a grid, how many points optuna's TPE proposes: 30, unless it is said.
        network: The name of a network, or a function that makes one.
        out: The search's folder; a search in it goes on where it was.
        device: cpu, cuda, or auto.
        tell: What to do with a sentence for each trial that begins: print, for example.
        **settings: Fields of a recipe: epochs, learning_rate, batch_size, optimiser, seed, ...
    """
    with _asked_in_python(), _recipe(data, network, regulariser, settings) as recipe:
        if trials is not None:
            check_count("trials", trials)
        space, proposals = searching.search_space(recipe.regulariser, _texts("grid", grid), trials)
        place = _place(data, out, device)
        search = searching.Search(
            recipe=recipe,
            space=space,
            folder=place.folder,
            trials=proposals,
            device=place.device,
            own=place.own,
        )
        curve = searching.run(search, InTurn(), on_start=lambda tried: tell(f"tuning: {tried.regulariser}"))
        return tuned.concluded(search, curve)


def compare(
    data: Data,
    regularisers: Sequence[str],
    *,
    folds: int | None = None,
    seeds: int | None = None,
    network: Network | None = None,
    out: str | Path,
    baseline: str | None = None,
    contrasts: str | Sequence[str] = (),
    tuned: bool = False,
    budget: int | None = None,
    grid: str | Sequence[str] = (),
    rope: float | None = None,
    decide_by: Analysis = "paired",
    hold_out: bool = False,
    device: str = "auto",
    tell: Tell = lambda sentence: None,
    **settings: Any,
) -> Comparison:
    """Train every regulariser on every fold or with every seed, and test the paired differences of their accuracies.

    Args:
        data: What to train on: see `dataset`; or the name of a recipe.
        regularisers: The rows, as on the command line: none, dropout, maxgain=2+dropout.
        folds: On how many folds. Data of your own are cut into as many for cross-validation, at least three, and
            their test part is left alone.
        seeds: With how many seeds, from `seed` on; with folds, on each of them.
        network: The name of a network, or a function that makes one.
        out: The comparison's folder; what is recorded there is not trained again.
        baseline: What the others are tested against: the first, unless it is said.
        contrasts: Test these pairs instead: maxgain+dropout:dropout; 'matched' stands for every X and maxgain+X.
        tuned: First choose the numbers that a regulariser leaves open, on each fold's validation part.
        budget: With `tuned`, how many runs to choose a row's numbers with: 9, unless it is said.
        grid: With `tuned`, the values to try instead, as gamma=1.25:3:0.25.
        rope: A difference below this many percentage points does not matter in practice.
        decide_by: Which analysis verdicts follow: paired, or pooled over all rows.
        hold_out: Train on the training part alone, and not on the validation part too.
        device: cpu, cuda, or auto.
        tell: What to do with a sentence for each run that ends: print, for example.
        **settings: Fields of a recipe: epochs, learning_rate, batch_size, optimiser, seed, ...
    """
    with _asked_in_python(), _recipe(data, network, None, settings) as recipe:
        given = {
            "recipe": recipe,
            "regularisers": _texts("regularisers", regularisers),
            "folds": folds,
            "seeds": seeds,
            "baseline": baseline,
            "contrasts": _texts("contrasts", contrasts),
            "rope": rope,
            "decide_by": decide_by,
            "tuned": tuned,
            "budget": budget,
            "grid": _texts("grid", grid),
            "hold_out": hold_out,
        }
        asked = _typed(given, Asked)
        place = _place(data, out, device)
        comparison = asking.answered(asked, place, _performing(tell))
        asking.write(comparison, place)
        return comparison


def page(folder: str | Path, out: str | Path = "report.html") -> Path:
    """Make one page of a run, a search or a comparison, and return where it is.

    Args:
        folder: What `out` named in one of the functions above, or a folder that holds several of such.
        out: The page.
    """
    with _asked_in_python():
        pages.write(_path(folder), _path(out))
        return _path(out)


def _performing(tell: Tell) -> asking.Perform:
    """Runs one after another, each told of as it ends."""

    def perform_missing(title: str, jobs: Sequence[Job], place: Place) -> None:
        missing = work.missing(jobs, records.read(place.results))
        ended = 0

        def on_done(job: Job, record: Record) -> None:
            nonlocal ended
            ended += 1
            how = "failed" if record["status"] == "failed" else "done"
            tell(f"{title}: {ended} of {counted(len(missing), 'run')}, {job.called}: {how}")

        work.perform_all(missing, place, InTurn(), on_done)

    return perform_missing


@contextmanager
def _recipe(data: Data, network: Network | None, regulariser: str | None, settings: dict[str, Any]) -> Iterator[Recipe]:
    """What is trained, with a network of your own among those that recipes can name."""
    if isinstance(data, str):
        own, recipe = None, recipe_named(data)
    elif isinstance(data, Dataset):
        usual: dict[str, Any] = {"optimiser": "adam", "learning_rate": 1e-3, "epochs": 30, "batch_size": 32}
        own, recipe = data, Recipe(name=data.name, dataset=data.name, network="mlp", **usual)
    else:
        raise RecipeError(f"data must be what `dataset` makes or the name of a recipe, not {type(data).__name__}.")
    with known(recipe.network if network is None else network, own) as name:
        named = {"network": name} | ({} if regulariser is None else {"regulariser": regulariser})
        possible = [field.name for field in fields(Recipe) if field.name not in FIXED]
        if strange := [setting for setting in settings if setting not in possible]:
            if strange[0] == "gamma":  # a flag of the command line
                raise RecipeError("there is no setting 'gamma': write it into the regulariser, as in maxgain=2.")
            raise RecipeError(unknown("setting", strange[0], possible))
        yield _typed(asdict(recipe) | named | settings, Recipe)


def _typed(values: dict[str, Any], kind: type[T]) -> T:
    """An object of values that may be of any type, refused where one has a wrong one."""
    try:
        return converted(values, kind)
    except (ValueError, TypeError, OverflowError) as error:
        raise RecipeError(f"this cannot be trained: {clause(error)}.") from error


def _place(data: Data, out: str | Path, device: str) -> Place:
    if not isinstance(device, str):
        raise RecipeError(f"device must be cpu, cuda or auto, not {device!r:.60}.")
    return Place(_path(out), device=device, own=data if isinstance(data, Dataset) else None)


def _path(given: str | Path) -> Path:
    if not isinstance(given, str | Path) or not str(given):
        raise RecipeError(f"a folder or a file is named by a text or a Path, not by {given!r:.60}.")
    return Path(os.path.expanduser(given))  # a folder called ~ is a trap for whoever removes it


def _texts(name: str, given: Any) -> tuple[str, ...]:
    """One text or several, as a tuple."""
    # An array has ideas of its own about what can be iterated over.
    several = isinstance(given, Iterable) and not isinstance(given, str) and not hasattr(given, "shape")
    texts = tuple(given) if several else (given,)
    if not all(isinstance(text, str) for text in texts):
        raise RecipeError(f"{name} must be texts, such as ['none', 'maxgain=2'], not {given!r:.60}.")
    return texts


@contextmanager
def _torch_as_usual() -> Iterator[None]:
    """What a program has set for all of torch, such as autocast, does not change what a run comes to, nor stop it."""
    if torch.get_default_dtype() != torch.float32:
        raise RecipeError(
            f"networks are trained in torch.float32 here, and torch makes tensors of {torch.get_default_dtype()}: "
            "call torch.set_default_dtype(torch.float32) before."
        )
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def _asked_in_python() -> Iterator[None]:
    """Errors name arguments and not flags, and Ctrl-C is Python's own again once a run is saved."""
    try:
        with _torch_as_usual():
            yield
    except Interrupted as interruption:
        raise KeyboardInterrupt(f"{interruption} is saved: the same call goes on with it") from None
    except MaxGainError as error:
        text = re.sub(r"'maxgain train --resume [^']*'", "a call with those settings", str(error))
        text = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), text)
        raise type(error)(text) from error
