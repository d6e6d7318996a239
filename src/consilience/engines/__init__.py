"""Where local steps run. Same method code, same numbers, other place of execution.

One after another: sequential, the reference.
All cores:         workers; _pool and _worker (the processes), _wire, _parcel, _plain, _plan (what passes between them).
One GPU:           slots; _sides (streams for questions), _shortage (memory that ran out).
Several GPUs:      devices. Several machines: ray. Sites of a federation: flower.
Any other place:   _twin, a second federation that does clients' work for the first.
Before a run:      choose, hardware, estimate, rehearse.
Clients' states:   store and _records, on disk.
"""

from .sequential import Sequential

__all__ = ["Sequential"]
