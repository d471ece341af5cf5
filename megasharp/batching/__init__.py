"""From training sequences to packed micro-batches and the step's global denominators. CPU only, pure."""
