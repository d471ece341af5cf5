"""The places of verification: worker processes with limits, and bubblewrap around the programs that a model wrote."""
