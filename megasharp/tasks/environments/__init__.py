"""Environments by their classes: a user's own, and those of other packages."""
