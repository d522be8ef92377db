"""The only folder that talks to other ranks."""
