"""What tyro has to say, out of the box that it draws around it: the one place that knows what such a box looks like.

tyro has no public exceptions for what is wrong with a command line, only these boxes and exit code 2. A test holds the
boxes of the installed version against what is read here; a box that cannot be read costs a hint and nothing else.
"""

import re
from itertools import groupby

UNREADABLE = "the options make no sense as they stand"
_UNFIT = re.compile(r"Error parsing (--[a-z-]+): .*?('.*')\]?$")
"""What is said of a value in the words of Python's types; the value stands at its end, in quotes."""


def sentence(box: str) -> str:
    """The first thing that a box says under its title, as the beginning of a sentence."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip(" │╭╮╰╯|+") for line in box.splitlines()[1:]]
    parts = groupby(lines, key=lambda line: bool(line.strip("─-")))
    complaint = next((" ".join(part) for has_words, part in parts if has_words), UNREADABLE)
    if unfit := _UNFIT.match(complaint.rstrip(" .")):
        return f"{unfit[1]} cannot be " + unfit[2].replace("', '", " ")
    said = complaint[:1].lower() + complaint[1:].rstrip(" .")
    return f"{said} ''" if said.endswith(":") else said  # of an empty word nothing can be seen
