"""What a training step costs with a constraint, as a ratio to the same step without, in one run."""

from .running import Settings as Settings
from .running import measure as measure
