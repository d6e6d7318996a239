"""Numbers that describe a run: each is a state that adds up, and a value computed from it."""
