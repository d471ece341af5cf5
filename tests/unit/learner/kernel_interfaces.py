"""The interfaces of others' attention kernels, as their sources have them: the names of parameters, in their order.

flash_attn_3 3.0.0: `hopper/flash_api.cpp` of Dao-AILab/flash-attention 0251105 (2026-08-15). flash-attn-4:
`flash_attn.cute.interface` of the wheels 4.0.0b4 and 4.0.0b36 (2026-10). Transformer Engine 2.20.0.dev0:
`DotProductAttention` of NVIDIA/TransformerEngine d0067d0 (2026-08-22). A test binds every call to them.
"""

from __future__ import annotations

FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, "
    "int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# Results of `_flash_attn_fwd` and of `_flash_attn_bwd`, and the parameters of both.
FA4 = {
    "4.0.0b4": (
        (2, 3),
        "q k v cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k page_table softmax_scale causal "
        "softcap window_size_left window_size_right learnable_sink m_block_size n_block_size num_threads num_splits "
        "pack_gqa _arch score_mod mask_mod block_sparse_tensors return_lse out lse aux_tensors",
        "q k v out dout lse softmax_scale causal softcap window_size_left window_size_right m_block_size n_block_size "
        "num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP "
        "AtomLayoutNdKV AtomLayoutMdQ V_in_regs cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q "
        "max_seqlen_k deterministic dq dk dv score_mod score_mod_bwd mask_mod aux_tensors block_sparse_tensors",
    ),
    "4.0.0b36": (
        (5, 3),
        "q k v qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k min_seqlen_k page_table "
        "softmax_scale causal softcap window_size_left window_size_right learnable_sink tile_mn mma_pv_is_rs "
        "intra_wg_overlap num_threads num_splits pack_gqa _arch score_mod mask_mod block_sparse_tensors return_lse "
        "out lse aux_tensors aux_scalars q_descale k_descale v_descale gather_kv_indices scheduler_metadata "
        "seqlen_k_per_split disable_scheduler_metadata gather_bwd_recompute_p",
        "q k v out dout lse softmax_scale causal softcap window_size_left window_size_right m_block_size n_block_size "
        "num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP "
        "AtomLayoutNdKV AtomLayoutMdQ V_in_regs cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q "
        "max_seqlen_k deterministic dq dk dv score_mod score_mod_bwd mask_mod aux_tensors aux_scalars "
        "block_sparse_tensors dlse learnable_sink",
    ),
}
ENGINE_MADE = (
    "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type window_size "
    "bottom_right_diagonal sequence_parallel tp_size get_rng_state_tracker tp_group layer_number attention_type "
    "cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit name"
)
ENGINE_CALLED = (
    "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded "
    "cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size bottom_right_diagonal "
    "checkpoint_core_attention core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill "
    "inference_params pad_between_seqs fp8_output bf16_backward num_splits score_mod score_mod_bprop "
    "score_mod_tensors score_mod_bprop_tensors qkv_layer kv_layer qkv_interleave_dim"
)
