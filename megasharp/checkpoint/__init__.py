"""The folder of a run: its layout, its lock, its attempts, and checkpoints that exist only when complete."""
