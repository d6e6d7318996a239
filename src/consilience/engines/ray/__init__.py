"""Several machines: a run's clients, or a comparison's runs, on a Ray cluster. The only place that imports Ray.

Ray sends Python objects by pickle. Whoever can reach a cluster can run code on it, so a cluster is one administrator's machines, not a
federation of parties that do not trust each other; that is `engines/flower`.
"""

from __future__ import annotations

from ...errors import ConfigError

try:
    import ray as _ray  # noqa: F401  (asked for here, so that its absence is said once and plainly)
except ImportError:
    raise ConfigError("This needs Ray, which is not installed: pip install 'consilience[ray]'. Without it engine=workers uses all cores of "
                      "this machine.") from None

from .cluster import Cluster, Plan
from .crew import Crew
from .engine import Ray
from .jobs import Lost, each_job

__all__ = ["Cluster", "Crew", "Lost", "Plan", "Ray", "each_job"]
