"""Foreign events, led onto the one path."""
