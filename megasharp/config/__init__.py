"""Configuration: strict loading (`core`) and the schema of a run (`run_config`)."""
