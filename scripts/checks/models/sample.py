"""The classes that the tests run: at least one of each kind of layer, position and feature."""

SAMPLE = (
    "AfmoeForCausalLM",  # windows, experts, gated attention that takes views
    "ApertusForCausalLM",
    "BertLMHeadModel",  # learned positions, layer norms after the sums
    "BloomForCausalLM",  # not by the attention interface
    "Cohere2ForCausalLM",  # windows, layers without rotary embedding
    "DeepseekV3ForCausalLM",  # multi-head latent attention, experts
    "Exaone4ForCausalLM",
    "FalconForCausalLM",  # not by the attention interface
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",  # softcaps
    "Gemma3ForConditionalGeneration",  # multimodal
    "Gemma3nForCausalLM",  # shared keys and values
    "Gemma4ForCausalLM",  # heads of two sizes
    "GptOssForCausalLM",  # attention sinks, windows, experts
    "GraniteMoeHybridForCausalLM",  # recurrent
    "LongcatFlashForCausalLM",  # two attentions in a layer, so that there is no list of them
    "Llama4ForCausalLM",  # chunks, queries scaled by position
    "LlamaForCausalLM",
    "MBartForCausalLM",  # positions by the cache's length
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",  # layers that pass no keywords on
    "OPTForCausalLM",
    "Phi3ForCausalLM",  # longrope
    "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",  # rotary embedding in three sections
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",  # recurrent
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",  # layers that pass no keywords on, a part of the head rotated
)
