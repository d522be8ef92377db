"""All communication between ranks. No other package calls `torch.distributed` collectives."""
