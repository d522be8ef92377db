"""Run sharded optimizers: gradients to shards, one step, updated parameters to all ranks."""
