"""Models: loading, tokenizers, the ragged forward pass."""
