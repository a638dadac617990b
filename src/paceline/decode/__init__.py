"""The decoding wing: models, cache, drafters, verification, engine. Needs the `engine` extra (torch)."""
