"""State as records and layouts; knows nothing of the runtime."""
