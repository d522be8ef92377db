"""ZeRO optimizer state sharding for PyTorch."""

__version__ = "0.1.0"
