"""From logits to verdicts: probabilities, noise, acceptance rules.

    prefix.py          what is committed of a sequence, as far as options depend on it
    options.py         allowed tokens, minimum length, bad words, bias, penalties: at each row's own position
    support.py         what top-k, top-p and min-p keep, without sorting the vocabulary
    noise.py           numbers by key: request, choice, position, purpose, token
    probabilities.py   the one way from logits to probabilities and draws, for draft and target alike
    rules.py           names of the acceptance rules, the walk they share; one file for each rule beside it
    chances.py         what `rejection` and `block` ask of chance, and the noise that answers
    leniency.py        what `relaxed` takes for likely enough
    logprobs.py        log-probabilities that are returned: the model's own

A verify pass is judged by `draw` on its rows, then `walk` (`rejection` and `block`: by the rule on `to_probs` of its
rows). Import modules by name: `rules` needs no torch.
"""
