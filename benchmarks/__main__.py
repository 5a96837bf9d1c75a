"""Run the bench."""

from .bench import main

if __name__ == "__main__":  # and not in the processes that it starts
    main()
