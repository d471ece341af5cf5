"""A run is a folder: its layout, its lock, and checkpoints that exist only when complete."""
