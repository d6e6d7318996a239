"""Consilience: federated learning for data that differs from client to client."""

from . import cuda_start as cuda_start  # first: any other module may start CUDA
from . import tree
from .core.client import ClientView
from .core.correction import Correction
from .core.layout import Layout
from .core.part import Batch, Model, Part, Phase, Spec
from .core.server import ServerView
from .core.step_view import StepView
from .data import from_arrays, load
from .errors import ConfigError, ConsilienceError, ConsilienceWarning, DataError, NonFiniteError, RefusedCombination
from .options import option
from .runs import Result, RunConfig, run
from .runs.compare import compare

__version__ = "0.1.0"

__all__ = ["Batch", "ClientView", "ConfigError", "ConsilienceError", "ConsilienceWarning", "Correction", "DataError", "Layout", "Model",
           "NonFiniteError", "Part", "Phase", "RefusedCombination", "Result", "RunConfig", "ServerView", "Spec", "StepView", "compare",
           "from_arrays", "load", "option", "run", "tree"]
