"""Layout: which rank owns which elements of which parameter. Pure values; no tensors, no process group."""
