"""Tasks, tokenizers and the stream of prompts. Pure: files in, records out."""
