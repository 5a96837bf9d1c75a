"""Measuring and projecting on a GPU in a handful of launches; what the kernels do not cover takes the plain path."""

from .measuring import measure as measure
from .merging import define_operator as define_operator
from .merging import record_compiled as record_compiled
from .projecting import FusedProjection as FusedProjection
from .projecting import can_fuse as can_fuse
from .replaying import Replayed as Replayed
