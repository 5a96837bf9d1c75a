"""The data sets of the study: where they lie, how they are read, split and fetched."""

from .arrays import dataset as dataset
from .splits import Dataset as Dataset
from .splits import Split as Split
from .splits import cross_validate as cross_validate
from .table import DATASETS as DATASETS
from .table import check as check
from .table import data_root as data_root
from .table import fetch as fetch
from .table import is_there as is_there
from .table import load as load
