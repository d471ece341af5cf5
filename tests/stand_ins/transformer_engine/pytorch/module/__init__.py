"""Nothing: what Megatron imports from below here is optional."""
