"""Limit how much each layer of a network may amplify its input, measured on the data it is trained on."""

from . import errors as errors
from . import functional as functional
from ._version import __version__ as __version__
from .gain import MaxGain as MaxGain
from .layers import register_layer as register_layer
from .lipschitz import Lipschitz as Lipschitz
from .maxnorm import MaxNorm as MaxNorm
from .maxnorm import WeightClip as WeightClip
from .norms import operator_norms as operator_norms
from .report import measure_gains as measure_gains
from .slope import sampled_slope as sampled_slope
