"""The study around the method: data, networks, training, comparison and reports (extra ``study``).

For Python it offers `train`, `tune` and `compare`, `dataset` for data of your own, and `page`: see ``api.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maxgain.errors import MissingExtraError

if TYPE_CHECKING:
    from .api import compare as compare
    from .api import dataset as dataset
    from .api import page as page
    from .api import train as train
    from .api import tune as tune

__all__ = ["compare", "dataset", "page", "train", "tune"]


def __getattr__(name: str) -> Any:
    """The names above, when they are asked for: everything that they need takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import api
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("maxgain"):
            raise
        raise MissingExtraError(f"the study needs {error.name}: pip install 'maxgain[study]'.") from error
    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
