"""Parts: one idea per file. The file's name is the part's name, everywhere."""

from .registry import PARTS, find_part
from .stack import parse_stack

__all__ = ["PARTS", "find_part", "parse_stack"]
