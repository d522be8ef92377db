"""Tensors, and the order of one step."""
