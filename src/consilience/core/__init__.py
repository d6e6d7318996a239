"""The round, the step and the vocabulary of parts. Pure: knows no part by name, reads and writes no files.

To begin with:  part (hooks, and what they are given), round (what happens in one), client and server (on either side of it), step.
Before round 1: policy, population, layout, task (what a run decides); method (parts, checked against each other); assemble (a module and
                a method made ready); declared (the first state); memory_layout.
A round:        federation (its state, and what serves the round), engine (what engines are asked for), samples (who trains on what),
                aggregate, store (clients between rounds), snapshot.
A step:         step_view (what hooks see), slot (the tensors), network (the one door for passes), optimiser, correction, gradients,
                descent, recall (frozen models, asked once a round), glance (a pass outside of training).
When it fails:  returned (what hooks return, checked), diagnose (where numbers stopped being finite).

How a model's layers are computed faster than PyTorch does it is below, in `layers` and `kernels`.
"""
