"""Rollouts: prompts become groups of verified responses, sampled by an engine."""
