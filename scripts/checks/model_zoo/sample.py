"""Classes that the tests run on every change: of each kind of layer, position and feature at least one."""

SAMPLE = ("LlamaForCausalLM",)
