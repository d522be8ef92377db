"""Random training programs, each run under zeroshard and under DDP with the plain optimizer, and compared."""
