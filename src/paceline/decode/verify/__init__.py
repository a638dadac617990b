"""From logits to verdicts: probabilities, noise, acceptance rules."""
