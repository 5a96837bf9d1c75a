"""The page about a run, a search or a comparison, and its figures."""

from .figures import early_curve as early_curve
from .figures import forest as forest
from .figures import gain_boxes as gain_boxes
from .figures import learning_curve as learning_curve
from .figures import tuning_curves as tuning_curves
from .page import build_page as build_page
