"""Run the bench."""

from .bench import main

main()
