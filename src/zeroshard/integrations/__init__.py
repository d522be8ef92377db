"""Integrations with training frameworks. Import the module of your framework; importing this package loads none."""
