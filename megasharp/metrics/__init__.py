"""What a run reports: figures of its groups, logs, tables of rollouts, clocks and the console."""
