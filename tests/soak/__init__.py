"""An endurance test: whole runs under random faults at random times, round after round (`python -m tests.soak`)."""
