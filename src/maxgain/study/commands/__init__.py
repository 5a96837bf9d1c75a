"""What the command line can do, one module a command: its options, and what it runs.

A command's ``Options`` is a frozen dataclass from which the flags and the help are made, and ``run(options, screen)``
does the work, shows it to people on the screen, and returns it for machines.
"""
