"""Checks of single options, whose errors name the value, its limits and what to do."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches

# The most tokens of a cache or a window.
MOST_TOKENS = 2**20
# Names of dtypes in other programs.
DTYPE_NAMES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32",
    "fp32": "float32", "f32": "float32",
}  # fmt: skip


# Arguments of ``load`` that are not options of the settings.
LOADING = (
    "target", "draft", "drafter", "tokenizer", "draft_tokenizer", "gguf_file", "device", "dtype", "pinned",
)  # fmt: skip
_QUANTISED = (
    "load the model quantised by transformers' from_pretrained and give the object, or give a quantised "
    "checkpoint; retrieval_weight_bits=4 quantises the retrieval level alone, and changes no text"
)
_DEVICES = (
    "give device='cuda', or a model object that is already placed; offload='auto' keeps what is "
    "larger than the GPU in host memory"
)
_MEMORY = "gpu_memory='24GiB' and host_memory='48GiB' limit what is used"
_OWN_FOLDER = "download it by huggingface_hub.snapshot_download and give the folder"
_DRAFT = "give the draft as the second argument: load(target, draft)"
_GENERATE = "give it to generate(...)"
# Options of other libraries, and what to do here instead.
_ELSEWHERE = {
    "model": "give the model first: load(model)",
    "assistant_model": _DRAFT,
    "draft_model": _DRAFT,
    "speculative_config": _DRAFT,
    "speculative_model": _DRAFT,
    "num_speculative_tokens": "advanced={'gamma': N} bounds what a pass proposes",
    "num_assistant_tokens": "advanced={'gamma': N} bounds what a pass proposes",
    "prompt_lookup_num_tokens": "drafter='lookup' proposes tokens that followed the newest before",
    "device_map": _DEVICES,
    "n_gpu_layers": _DEVICES,
    "load_in_4bit": _QUANTISED,
    "load_in_8bit": _QUANTISED,
    "quantization_config": _QUANTISED,
    "quantization": _QUANTISED,
    "torch_dtype": "its name is dtype here",
    "trust_remote_code": "code of a checkpoint is never run; load the model yourself and give the object",
    "attn_implementation": "attention runs on kernels of this package; leave it out",
    "low_cpu_mem_usage": "weights are read straight to their device in any case; leave it out",
    "max_memory": _MEMORY,
    "gpu_memory_utilization": _MEMORY,
    "use_safetensors": "weights are read from safetensors alone; leave it out",
    "token": "set HF_TOKEN, or log in by hf auth login",
    "use_auth_token": "set HF_TOKEN, or log in by hf auth login",
    "revision": _OWN_FOLDER,
    "subfolder": _OWN_FOLDER,
    "cache_dir": "set HF_HOME, which names the hub's cache folder",
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "tensor_parallel_size": "start the program by torchrun --nproc-per-node N, whose ranks share the target",
    "max_model_len": "buffers are made for each prompt; leave it out",
    "n_ctx": "buffers are made for each prompt; leave it out",
    **dict.fromkeys(
        (
            "max_new_tokens", "max_tokens", "temperature", "top_p", "top_k", "min_p", "do_sample", "seed",
            "repetition_penalty", "stop_strings", "num_beams", "num_return_sequences", "streamer",
        ),
        _GENERATE,
    ),
}  # fmt: skip


def unknown_option(name: str, known: Collection[str], advanced: bool = False) -> ValueError:
    """Returns the error about an option that does not exist, which says what to do instead.

    Args:
        known: the options that exist where ``name`` was given.
        advanced: whether it was given inside ``advanced``.
    """
    near = get_close_matches(name, known if advanced else [*known, *LOADING], 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if advanced:
        return ValueError(f"unknown advanced option {name!r}; {hint}docs/advanced.md lists all")
    if name in LOADING:
        return ValueError(f"{name!r} is an option of load(...) alone; load the models anew")
    if name in _ELSEWHERE:
        return ValueError(f"unknown option {name!r}; {_ELSEWHERE[name]}")
    return ValueError(
        f"unknown option {name!r}; {hint}help(triforce_tree.load) and docs/options.md list all, such as "
        "budget, levels and tree"
    )


def misplaced_option(name: str, value: object, advanced: bool) -> ValueError:
    """Returns the error about an option given inside ``advanced`` that belongs outside, or the reverse.

    Args:
        advanced: whether it belongs inside.
    """
    if advanced:
        return ValueError(f"{name!r} is an advanced option; give advanced={{{name!r}: {shortened(value)}}}")
    return ValueError(f"{name!r} is no advanced option; give {name}={shortened(value)} beside advanced")


def shortened(value: object) -> str:
    """Returns ``repr(value)`` in one line, cut to 60 characters."""
    text = " ".join(line.strip() for line in repr(value).split("\n"))
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(value: object, allowed: Collection[object]) -> str:
    """Returns " (did you mean ...?)" with the nearest allowed word, or an empty string if none is near."""
    words = {str(each): each for each in allowed}
    near = get_close_matches(str(value), words, 1)
    return f" (did you mean {words[near[0]]!r}?)" if near and isinstance(value, str) else ""


def within(name: str, value: object, least: int, most: int = MOST_TOKENS) -> None:
    """Raises ValueError unless the value of an option is an integer from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least} and at most {most}")


def one_of(name: str, value: object, *allowed: object) -> None:
    """Raises ValueError unless an option has one of the allowed values. True does not count as 1."""
    if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in allowed):
        *first, last = map(repr, allowed)
        raise ValueError(
            f"{name}={value!r} must be {', '.join(first)} or {last}{did_you_mean(value, allowed)}"
        )


def alone(option: str, refused: Mapping[str, object]) -> None:
    """Raises ValueError if any of ``refused`` is given beside an option.

    Args:
        refused: whether each other option is given, by its name.
    """
    if named := [name for name, given in refused.items() if given]:
        raise ValueError(f"{option} does not work with {named[0]}; leave one of them out")


def check_positions(prompt: int, new: int, positions: int | None) -> None:
    """Raises ValueError if prompt and new tokens exceed a model's positions; None means no limit."""
    if positions is not None and prompt + new > positions:
        remedy = f" or set max_new_tokens<={positions - prompt}" if prompt < positions else ""
        raise ValueError(
            f"{prompt} prompt tokens + {new} new ones = {prompt + new} exceed the model's "
            f"{positions} positions; shorten the prompt{remedy}"
        )
