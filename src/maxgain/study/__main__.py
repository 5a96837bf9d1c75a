"""Where the command line begins, also for somebody who did not install what it needs."""

import os
import sys

from . import signals


def main() -> int:
    """Runs the command line, or says how to install it."""
    for name in ("MPLBACKEND", "SOURCE_DATE_EPOCH"):  # matplotlib's: figures go into files here, and have no date
        os.environ.pop(name, None)
    try:
        os.getcwd()
    except FileNotFoundError:  # of which torch would say that a part of it is missing
        sys.stderr.write("maxgain: the folder that this shell is in was removed: change to another, and try again.\n")
        return 2
    try:
        with signals.ending():  # what is imported here takes seconds
            from .cli.app import main as run
        return run()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("maxgain"):
            raise
        sys.stderr.write(f"maxgain: the command line needs {error.name}: pip install 'maxgain[study]'.\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
