"""Ways to sample with DLC's subtraction, as `bench_dlc.py` times them: equal seeds draw equal tokens in each."""
