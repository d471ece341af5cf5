"""Configuration: strict loading (`core`) and the whole schema of one run (`run`)."""
