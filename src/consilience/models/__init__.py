"""Models with named stages, and any model of the user's own by naming its points."""

from .architecture import Architecture, Built, Need
from .choice import default_for
from .pretrained import load_pretrained
from .probe import Point, check_layout, describe_points
from .registry import MODELS, make, settings_of
from .user import from_user, parse_taps

__all__ = ["MODELS", "Architecture", "Built", "Need", "Point", "check_layout", "default_for", "describe_points",
           "from_user", "load_pretrained", "make", "parse_taps", "settings_of"]
