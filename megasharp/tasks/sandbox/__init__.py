"""Where verification runs: worker processes with limits, and bubblewrap around the programs that a model wrote."""
