"""Measuring and projecting on a GPU in a handful of launches; what the kernels do not cover takes the plain path."""

from .measuring import Linear as Linear
from .measuring import covers as covers
from .measuring import measure as measure
from .measuring import measure_op as measure_op
from .measuring import record as record
from .measuring import record_op as record_op
from .projecting import FusedProjection as FusedProjection
from .projecting import can_fuse as can_fuse
