"""For every input there could be: operator norms, their projection, and bounds of whole networks."""

from .norms import operator_norms as operator_norms
from .projection import Lipschitz as Lipschitz
