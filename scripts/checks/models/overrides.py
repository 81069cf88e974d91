"""Lists what single families need beside the general rules, as keywords of their configurations."""

from scripts.checks.models.shrink import (
    DROP,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    ORIGINAL,
    VOCABULARY,
    WINDOW,
    Settings,
)

_THETA: Settings = {"rope_type": "default", "rope_theta": 10_000.0}
_MROPE = {"rope_parameters": {**_THETA, "mrope_section": [2, 1, 1]}}
_BY_KIND = {"rope_parameters": {"full_attention": _THETA, "sliding_attention": _THETA}}
YARN: Settings = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 10_000.0,
}  # fmt: skip
LLAMA3: Settings = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL, "rope_theta": 10_000.0,
}  # fmt: skip
# Short and long frequencies of a head of 8.
LONGROPE: Settings = {
    "rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0],
}  # fmt: skip
_HALF = {"partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1], "long_factor": [2.0, 6.0]}
DYNAMIC: Settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
# The inner width of a mamba layer is twice the hidden size.
_MAMBA: Settings = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_dt_rank": 4,
}  # fmt: skip
_ALTERNATING: Settings = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_TOP: Settings = {
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
_SAM: Settings = {
    "hidden_size": HIDDEN, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 56, "patch_size": 14, "mlp_dim": 16, "window_size": 2, "global_attn_indexes": [0],
}  # fmt: skip
_INDEXER: Settings = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 24,
    "indexer_compress_ratio": 4, "hc_lowrank": 8, "ple_embed_dim": 8, "ngram_vocab_size_base": 64,
    "split_ngram_parts": 4,
}  # fmt: skip

# As wide as the parts of its keys with and without rotary positions.
_DOTS3: Settings = {"per_layer_config": {}, "head_dim": 12}
_VQ: Settings = {
    "base_channels": 32, "channel_multiplier": [1], "num_embeddings": 16, "latent_channels": 8,
    "embed_dim": 8,
}  # fmt: skip
_INKLING2: Settings = {"unpadded_vocab_size": VOCABULARY}
_DOTS3_VISION: Settings = {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN}
_DOTS3_AUDIO: Settings = {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN}
# By the class of the configuration. ``__base__``: what the default configuration cannot be made without.
BY_CONFIG: dict[str, Settings] = {
    "BambaConfig": {**_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "BltConfig": {"encoder_hash_byte_group_vocab": 32, "patch_size": 4},
    "BailingHybridConfig": {"num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1},
    "KimiLinearConfig": {"num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1},
    "Dots3NoteTextConfig": _DOTS3,
    "Dots3NoteConfig": {"text_config": _DOTS3, "vision_config": _DOTS3_VISION, "audio_config": _DOTS3_AUDIO},
    "DoryConfig": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "HYV4VLConfig": {"text_config": {"qk_rope_head_dim": 8, "head_dim": 8, **_MROPE}},
    "Inkling2TextConfig": _INKLING2,
    "Inkling2Config": {"text_config": _INKLING2},
    "Inkling2LoopTextConfig": _INKLING2,
    "Inkling2LoopConfig": {"text_config": _INKLING2},
    "ProphetNetConfig": {"num_decoder_layers": 2, "num_encoder_layers": 2},
    "EvollaConfig": {},
    "Florence2Config": {"vision_config": {
        "depths": [1, 1, 1, 1], "embed_dim": [8, 8, 8, 8], "num_heads": [2, 2, 2, 2],
        "num_groups": [2, 2, 2, 2], "projection_dim": HIDDEN, "window_size": 4}},
    "UnlimitedOcrConfig": {"vision_config": {"sam_config": {**_SAM, "downsample_channels": [8, 8]}}},
    "PPFormulaNetConfig": {"vision_config": {
        **_SAM, "post_conv_out_channels": 8, "post_conv_mid_channels": 8}},
    "Ernie4_5_VLMoeConfig": {"text_config": {
        "moe_intermediate_size": [16, 16], "rope_parameters": {**_THETA, "mrope_section": [1, 1, 2]}}},
    "DiffusionGemmaConfig": {"text_config": {
        "global_head_dim": 16, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "MuseSparkConfig": {"audio_config": {
        "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "num_hidden_layers": 4}},
    "NemotronH_Omni_Reasoning_V3_Config": {
        "video_temporal_patch_size": DROP, "vision_config": {"video_temporal_patch_size": 2}, "text_config": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16}},
    "Step3p7Config": {"text_config": {"sliding_window": WINDOW}},
    "HunYuanVLConfig": {"text_config": {"rope_parameters": {**_THETA, "mrope_section": [1, 1, 1, 1]}}},
    "Emu3Config": {"vocabulary_map": {"<image>": VOCABULARY - 1}, "vq_config": {
        **_VQ, "codebook_size": 16, "hidden_size": HIDDEN}},
    "ChameleonConfig": {"vocabulary_map": {"<image>": VOCABULARY - 1}, "vq_config": _VQ},
    "CodeGenConfig": {"rotary_dim": 4},
    "CohereCompassTextConfig": _BY_KIND,
    "CohereCompassConfig": {"text_config": _BY_KIND},
    "Cosmos3EdgeConfig": {"text_config": _MROPE},
    "DbrxConfig": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10_000.0, "clip_qkv": 8.0},
                   "ffn_config": {"moe_top_k": 2}},
    "DeepseekOcr2Config": {
        "text_config": {**_TOP, "first_k_dense_replace": DROP, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"sam_config": {**_SAM, "downsample_channels": [8, 8]}},
    },
    "DeepseekV2Config": _TOP,
    "DeepseekVLHybridConfig": {"high_res_vision_config": _SAM},
    "Dots1Config": {**_TOP, **_ALTERNATING, "max_window_layers": 1},
    "Gemma3nTextConfig": {"intermediate_size": INNER},
    "Gemma4TextConfig": {"global_head_dim": 16},
    "Glm4vConfig": {"text_config": _MROPE},
    "Glm4vMoeConfig": {"text_config": {"head_dim": 16, "rope_parameters": {
        **_THETA, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}},
    "Glm46VConfig": {"text_config": _MROPE},
    "GlmOcrConfig": {"text_config": _MROPE},
    "Glm5NextConfig": {"text_config": {"index_kpool": 4}},
    "GPTJConfig": {"rotary_dim": 4},
    "GraniteMoeHybridConfig": {**_MAMBA, "num_hidden_layers": 4, "shared_intermediate_size": 16,
                               "layer_types": ["linear_attention", "full_attention"] * 2},
    "Granite4VisionConfig": {"spatial_target_layers": [0], "deepstack_layer_map": [[-1, 0]],
                             "downsample_rate": "1/2",
                             "vision_config": {"hidden_size": 64},
                             "qformer_config": {"cross_attention_frequency": 1, "num_attention_heads": 4}},
    "JambaConfig": {**_MAMBA, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "JanusConfig": {"vq_config": _VQ},
    "Lfm2MoeConfig": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
                      "num_dense_layers": 1},
    "LongcatFlashConfig": {"zero_expert_num": 2},
    "Mamba2Config": {"num_heads": 8, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "MiniMaxM3VLConfig": {},
    "Molmo2Config": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "NemotronHConfig": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8,
                        "chunk_size": 16, "expand": 2},
    "Phi4MultimodalConfig": {"vision_config": {"crop_size": 28}, "audio_config": {
        "num_blocks": 1, "ext_pw_out_channel": HIDDEN, "depthwise_separable_out_channel": HIDDEN,
        "nemo_conv_channels": HIDDEN}},
    "PaddleOCRVLConfig": {"text_config": _MROPE},
    "Qwen2_5_VLConfig": {"text_config": _MROPE},
    "Qwen2VLConfig": {"text_config": _MROPE},
    "Qwen2_5OmniThinkerConfig": {"text_config": _MROPE, "vision_start_token_id": 90},
    "Qwen3OmniMoeThinkerConfig": {"text_config": _MROPE, "vision_start_token_id": 90},
    "Qwen3VLConfig": {"text_config": _MROPE},
    "Qwen3VLMoeConfig": {"text_config": _MROPE},
    "Qwen4ExpTextConfig": _INDEXER,
    "Qwen4ExpConfig": {"text_config": _INDEXER},
    "RecurrentGemmaConfig": {"num_hidden_layers": 6},
    "ReformerConfig": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 16],
                       "num_hashes": 1, "feed_forward_size": 32},
    "RoCBertConfig": {"pronunciation_vocab_size": 96, "shape_vocab_size": 96, "shape_embed_dim": 8,
                      "pronunciation_embed_dim": 8},
    "xLSTMConfig": {"num_blocks": 2, "chunk_size": 16},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"mamba_dt_rank": 4, "mamba_d_state": 8, "attention_hidden_size": 2 * HIDDEN,
                    "attention_head_dim": 16},
    "Zamba2Config": {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 16,
                     "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 16, "num_query_groups": HEADS,
                     "kv_channels": 8},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "Gemma4AssistantConfig": {"__base__": {"text_config": {"hidden_size_per_layer_input": 0,
                                                           "model_type": "gemma4_text"}}},
}  # fmt: skip
# Further feature sets of a class: name -> keywords of its configuration.
_SLIDING: Settings = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
                      "num_hidden_layers": 3, "layer_types": DROP}  # fmt: skip
VARIANTS: dict[str, dict[str, Settings]] = {
    "LlamaForCausalLM": {
        "yarn": {"rope_parameters": YARN}, "llama3 rope": {"rope_parameters": LLAMA3},
        "dynamic rope": {"rope_parameters": DYNAMIC, "max_position_embeddings": 256},
        "longrope": {"rope_parameters": LONGROPE}, "one KV head": {"num_key_value_heads": 1},
    },
    "Phi3ForCausalLM": {
        "longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
        "longrope, half rotated": {"rope_parameters": {**LONGROPE, **_HALF}, "sliding_window": WINDOW,
                                   "original_max_position_embeddings": ORIGINAL},
    },
    "PhimoeForCausalLM": {"longrope": {"rope_parameters": {
        **LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}}},
    "Qwen2ForCausalLM": {"sliding window": _SLIDING, "yarn": {"rope_parameters": YARN}},
    "Qwen3ForCausalLM": {"sliding window": _SLIDING, "yarn": {"rope_parameters": YARN}},
    "Gemma4ForCausalLM": {
        "shared KV": {"num_kv_shared_layers": 2, **_ALTERNATING},
        "experts, K = V": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                           "moe_intermediate_size": 16, "attention_k_eq_v": True,
                           "num_global_key_value_heads": 1},
    },
    "Llama4ForCausalLM": {"one chunk": {"attention_chunk_size": 512}},
    "FalconForCausalLM": {"alibi": {"alibi": True}, "new decoder": {"new_decoder_architecture": True}},
    "DeepseekV3ForCausalLM": {"yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}},
    "GptOssForCausalLM": {"yarn": {"rope_parameters": YARN}},
}  # fmt: skip
