"""The trainer's side of a fleet of SGLang servers: starts them, watches them, feeds them. Imports no sglang."""
