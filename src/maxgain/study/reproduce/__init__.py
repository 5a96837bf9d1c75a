"""The paper's tables and figures, run again: which runs each needs, running what is missing, and what came out."""

from .experiments import EXPERIMENTS as EXPERIMENTS
from .experiments import Experiment as Experiment
from .state import State as State
from .state import look as look
