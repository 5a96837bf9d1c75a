"""Start the command line, or say how to install what it needs."""

import sys


def main() -> int:
    """Run the command line."""
    try:
        from .cli.app import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("maxgain"):
            raise
        sys.stderr.write(f"maxgain: the command line needs {error.name}: pip install 'maxgain[study]'.\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
