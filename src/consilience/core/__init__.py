"""The round, the step and the vocabulary of parts. Pure: knows no part by name, reads and writes no files.

How a model's layers are computed faster than PyTorch does it is below, in `layers` and `kernels`.
"""
