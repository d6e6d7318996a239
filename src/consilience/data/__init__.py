"""Data sets, and how they are divided among clients."""

from .dataset import Dataset
from .federated import ClientRows, FederatedData, Transform, as_float
from .load import load
from .sources import SOURCES, Source
from .sources._bring import from_arrays
from .split_file import save_split

__all__ = ["SOURCES", "ClientRows", "Dataset", "FederatedData", "Source", "Transform", "as_float", "from_arrays", "load",
           "save_split"]
