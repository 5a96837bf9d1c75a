"""The study: train, tune and compare regularisers, and report what came out (extra ``study``).

`maxgain.study.api` describes the functions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from maxgain.errors import MissingExtraError

if TYPE_CHECKING:
    from .api import compare as compare
    from .api import page as page
    from .api import run_plan as run_plan
    from .api import train as train
    from .api import tune as tune
    from .data import dataset as dataset
    from .plan import Plan as Plan
    from .recipe import Recipe as Recipe
    from .result import Inputs as Inputs
    from .result import Run as Run
    from .result import export as export
    from .result import load as load
    from .running import Machine as Machine

_HOMES = {
    "compare": "api", "page": "api", "run_plan": "api", "train": "api", "tune": "api", "dataset": "data",
    "Plan": "plan", "Recipe": "recipe", "Inputs": "result", "Run": "result", "export": "result", "load": "result",
    "Machine": "running",
}  # fmt: skip
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a name when it is used: all of the study takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("maxgain"):
            raise
        raise MissingExtraError(f"the study needs {error.name}: pip install 'maxgain[study]'.") from error
