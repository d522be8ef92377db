"""The command line: what is in a checkpoint, and checkpoints in other formats."""
