"""Limit how much each layer of a network may amplify its input, measured on the data it is trained on."""

from . import errors as errors
from . import functional as functional
from ._version import __version__ as __version__
from .attention import split_attention as split_attention
from .experts import split_experts as split_experts
from .gain import MaxGain as MaxGain
from .layers import register_layer as register_layer
from .lipschitz.norms import operator_norms as operator_norms
from .lipschitz.projection import Lipschitz as Lipschitz
from .lipschitz.slope import sampled_slope as sampled_slope
from .measure import measure_gains as measure_gains
from .weights import MaxNorm as MaxNorm
from .weights import WeightClip as WeightClip
