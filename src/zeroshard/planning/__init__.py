"""Will it fit, on how many ranks, and what does the network pay? Computed from shapes, before anything runs."""
