"""The controller: how far each sequence drafts in each round, from live cost and live survival. No torch."""
