"""How weights travel from the learner to the engines: one versioned stream of (Hugging Face name, tensor)."""
