"""Sharded optimizers inside training frameworks. Each module needs its framework, and is imported by its users only."""
