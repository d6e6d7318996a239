"""Data sets, and how they are divided among clients."""

from .federated import ClientRows, FederatedData, Transform, as_float

__all__ = ["ClientRows", "FederatedData", "Transform", "as_float"]
