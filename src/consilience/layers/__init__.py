"""PyTorch's layers, computed another way: together with their neighbours, in bfloat16 all at once, in another memory layout.

A model keeps its layers, names, parameters and hooks; `core/network.py` asks for the faster way when it is given the model. What is here
finds where a way applies and leaves everything else to PyTorch. It uses `kernels` and knows no parts and no rounds.
"""
