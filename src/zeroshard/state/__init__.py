"""Optimizer state: shards, state dicts and their serialization. Independent of the engine."""
