"""For every input there could be: operator norms, their projection, bounds of whole networks, slopes."""

from .norms import operator_norms as operator_norms
from .projection import Lipschitz as Lipschitz
from .slope import sampled_slope as sampled_slope
