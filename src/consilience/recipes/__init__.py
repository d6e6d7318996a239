"""Tables and figures of the papers as data, and what runs them. One folder per paper, one TOML file per table or figure."""

from .format import Cell, Column, Printed, Recipe, Row, Score
from .load import load_recipe, recipe_names

__all__ = ["Cell", "Column", "Printed", "Recipe", "Row", "Score", "load_recipe", "recipe_names"]
