"""Between Hugging Face and Megatron-core: one table per model family, and checkpoint folders."""
