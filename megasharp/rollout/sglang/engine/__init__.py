"""SGLang as megasharp uses it; runs in the engines' own Python and imports no trainer.

`server.py` starts one engine; `engine_config.py` says what its config file holds and what is refused, `check.py`
refuses it without starting. `sglang_internals.py` names all of SGLang that is used from inside, which moves between its
versions: hence one exact version (`check.py`). `sglang_patches.py` lists what is changed in SGLang's processes, and
`server_patches.py` what is changed in its server alone.

Run and compared with transformers on a CPU: `docs/explanation/sglang.md` has the figures. What concerns CUDA
(graphs, FlashAttention-3's plans, sleep and wake) was read from SGLang's source and has not run.
"""
