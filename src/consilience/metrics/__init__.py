"""What is measured: scores of models, and what they are made of.

In every round: accuracy (also of single clients), criterion (what a run is judged by).
Measures:       measures (one class each), registry (by name), subject (what they may ask), gather (models' answers), local_training.
Formulas:       classification, clients, clusters, costs, curves, forgetting, parameters, similarity; mdl and its probes.
"""
