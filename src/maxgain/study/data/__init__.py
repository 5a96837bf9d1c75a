"""The data sets of the study: where they lie, how they are read, split and fetched."""

from .arrays import dataset as dataset
from .sources import DATASETS as DATASETS
from .sources import check as check
from .sources import data_root as data_root
from .sources import fetch as fetch
from .sources import is_there as is_there
from .sources import load as load
from .splits import Dataset as Dataset
from .splits import Split as Split
from .splits import cross_validate as cross_validate
