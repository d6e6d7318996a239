"""Consilience: federated learning for data that differs from client to client."""

from . import cuda_start as cuda_start  # first: any other module may start CUDA
from . import tree
from .core.correction import Correction
from .core.part import Part
from .data import from_arrays, load
from .errors import ConfigError, ConsilienceError, ConsilienceWarning, DataError, NonFiniteError, RefusedCombination
from .options import option
from .runs import Result, RunConfig, run
from .runs.compare import compare

__version__ = "0.1.0"

__all__ = ["ConfigError", "ConsilienceError", "ConsilienceWarning", "Correction", "DataError", "NonFiniteError", "Part",
           "RefusedCombination", "Result", "RunConfig", "compare", "from_arrays", "load", "option", "run", "tree"]
