"""Reasons that several parts give for refusing the same thing."""

from __future__ import annotations

from ..core.method import Method
from ..core.part import Part, Spec

NEEDS_AVERAGE = {"no global model": "acts on the average of the clients' models",
                 "models that travel only now and then": "acts on the average of the clients' models in every round"}

# Traits that several parts have.
OWN_MODEL = "clients that receive the model they trained"
WHOLE_MODELS = "whole models that go to other clients"


def bounds_changes(other: Part) -> str | None:
    """Why a part with whole models among its uploads cannot stand beside one that scales all uploads to a small norm."""
    if Method.has(other, "release"):
        return f"uploads whole models, and {other.name} bounds uploads as if they were changes"
    return None


def sends_norms(spec: Spec) -> str | None:
    """Whole models hold the layers that the run would keep at home."""
    if spec.policy.batchnorm == "local" and spec.norm:
        return "sends whole models to other clients, BatchNorm included. Use batchnorm=params or all."
    return None


def needs_fresh_sgd(spec: Spec) -> str | None:
    """Divisors by the length of the local path hold for SGD that starts anew each round."""
    if spec.policy.optimiser != "sgd":
        return "divides by the length of SGD's path, which Adam does not have. Use optimiser=sgd."
    if spec.policy.optimiser_state == "kept" and spec.policy.momentum:
        return ("divides by the length of the local path, which is not known when momentum is kept across rounds. "
                "Use optimiser_state=reset or momentum=0.")
    return None
