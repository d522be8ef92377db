"""The engine of a sharded optimizer: reduce gradients to shards, step the shards, all-gather updated parameters."""
