"""What is measured: scores of models, and what they are made of."""
