"""Consilience: federated learning for data that differs from client to client."""

__version__ = "0.1.0"
