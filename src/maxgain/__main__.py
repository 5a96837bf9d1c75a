"""``python -m maxgain`` is the command line."""

import sys

from .study.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
