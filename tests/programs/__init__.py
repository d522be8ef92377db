"""Random training programs. Each runs under zeroshard and under DDP with the plain optimizer; results are compared."""
