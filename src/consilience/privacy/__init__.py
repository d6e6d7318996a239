"""What clipping and noise are worth: secret noise, and the (ε, δ) that many noisy releases add up to."""
