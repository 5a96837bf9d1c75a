"""How much memory there is, and running out of it in words."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from maxgain.errors import RunError

# On the CPU torch has no kind of error for it, and one of CUDA's libraries none either.
_SAYINGS = re.compile(
    r"can't allocate memory|not enough memory|out of memory|ALLOC(ATION)?_FAILED|[Ss]torage size calculation overflow|"
    r"numel: integer multiplication overflow"
)


def physical() -> int:
    """The machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def explained(error: Exception) -> RunError:
    """Running out of memory, however it was noticed, in a sentence; any other error is raised again."""
    if not any(
        isinstance(one, MemoryError | torch.OutOfMemoryError) or _SAYINGS.search(str(one)) for one in _all(error)
    ):
        raise error
    return RunError(
        "there is not enough memory: try a smaller --batch-size or --image-size, fewer runs at once (--jobs or "
        "--per-gpu), or another --device."
    )


def _all(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those behind it: ending a capture fails too where the capture ran out of memory, and hides that."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def in_words() -> Iterator[None]:
    """Within this, running out of memory is told in a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise explained(error) from error
