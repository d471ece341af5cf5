"""A fleet of SGLang servers: `engine` runs in their own Python, `client` in the trainer's, `bucket` is read by both."""
