"""Each error names the value, the limit and a remedy."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM

import triforce_tree
from tests.support.models.api_cases import characters
from tests.support.models.families import VOCABULARY, prompt_of, tiny
from tests.support.models.own_drafters import FixedSiblings
from tests.support.processes.messages import says
from triforce_tree.config import HierarchyConfig, RetrievalConfig, StreamingConfig, load_arguments

TARGET = tiny("llama-gqa")


@pytest.fixture(scope="module")
def engine() -> triforce_tree.Engine:
    return triforce_tree.load(TARGET)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TARGET.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "inputs", [[], torch.empty(1, 0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)]
)
def test_empty_prompt(engine, inputs) -> None:
    with pytest.raises(ValueError, match=says("prompt is empty", "at least one token")):
        engine.generate(inputs, max_new_tokens=3)


def test_a_prompt_of_padding_alone_is_empty(engine) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.generate([1, 2], attention_mask=torch.zeros(1, 2), max_new_tokens=3)


@pytest.mark.parametrize("prompt", ["caf\udce9", [{"role": "user", "content": "caf\udce9"}]])
def test_text_that_was_no_utf_8(prompt) -> None:
    own = triforce_tree.load(TARGET, tokenizer=characters())
    with pytest.raises(ValueError, match=says(r"'\udce9'", "character 3", "no UTF-8", "convert it first")):
        own.generate(prompt, max_new_tokens=3)


def test_a_tokenizer_that_panics_is_an_error_of_one_sentence() -> None:
    """A regular expression that gives up, at every place where text is read."""
    tokenizer = characters()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    split = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.Split("", "isolated")]
    )
    own = triforce_tree.load(TARGET, tokenizer=tokenizer)
    text, chat = "x" * 60, [{"role": "user", "content": "x" * 60}]
    session, tree = own.session("ab"), own.tree("ab")
    calls: dict[str, Callable[[], object]] = {
        "text": lambda: own.generate(text, max_new_tokens=2),
        "texts": lambda: own.generate(["ab", text], max_new_tokens=2),
        "chat": lambda: own.generate(chat, max_new_tokens=2),
        "session": lambda: own.session(text),
        "session of a chat": lambda: own.session().generate(chat, max_new_tokens=2),
        "session that goes on": lambda: session.generate(text, max_new_tokens=2),
        "tree": lambda: own.tree(text),
        "tree that goes on": lambda: tree.extend(tree.root, text),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"^the tokenizer cannot tokenize this text; .*Panic") as caught:
            call()
        assert "\n" not in str(caught.value), name
    assert session.generate("ab", max_new_tokens=2).new_tokens == 2


def test_text_without_a_tokenizer(engine) -> None:
    with pytest.raises(ValueError, match=says("tokenizer", "load(..., tokenizer=...)")):
        engine.generate("some text", max_new_tokens=3)
    with pytest.raises(ValueError, match=says("stop_strings", "tokenizer")):
        engine.generate([1], stop_strings="x", max_new_tokens=3)


def test_prompt_longer_than_the_positions(engine) -> None:
    limit = TARGET.config.max_position_embeddings
    with pytest.raises(
        ValueError, match=says(limit - 5, "+ 6", limit + 1, f"{limit} positions", "max_new_tokens<=5")
    ):
        engine.generate(prompt_of(limit - 5), max_new_tokens=6)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary(engine, token: int) -> None:
    words = says(f"token id {token}", f"vocabulary of {VOCABULARY}", f"from 0 to {VOCABULARY - 1}")
    with pytest.raises(ValueError, match=words):
        engine.generate([1, token, 2], max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bad_words_ids": [3]}, ["bad_words_ids=[3]", "list of lists"]),
        ({"bad_words_ids": [[3, 64]]}, ["bad_words_ids", "token 64", "below 64"]),
        ({"sequence_bias": {(64,): 1.0}}, ["sequence_bias", "token 64", "below 64"]),
        ({"suppress_tokens": 3}, ["suppress_tokens=3", "list of token ids"]),
        ({"begin_suppress_tokens": 3}, ["begin_suppress_tokens=3", "list of token ids"]),
        ({"stop_strings": 3}, ["stop_strings=3", "a string or a list"]),
        ({"prefix_allowed_tokens_fn": 3}, ["prefix_allowed_tokens_fn=3", "cannot be called"]),
        ({"do_sample": "no"}, ["do_sample='no'", "True or False"]),
        ({"output_scores": "no"}, ["output_scores='no'", "True or False"]),
        (
            {"exponential_decay_length_penalty": (1, 1.5)},
            ["exponential_decay_length_penalty", "eos_token_id"],
        ),
    ],
    ids=lambda given: next(iter(given)),
)
def test_options_of_a_wrong_form(engine, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*words)):
        engine.generate(prompt_of(9), max_new_tokens=3, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"suppress_tokens": [-1, 5, VOCABULARY]},
        {"begin_suppress_tokens": [-1, 5, VOCABULARY]},
        {"eos_token_id": [-1, 5, VOCABULARY], "min_new_tokens": 4},
    ],
    ids=lambda given: next(iter(given)),
)
def test_forbidden_tokens_outside_the_vocabulary_have_no_effect(engine, options: dict[str, Any]) -> None:
    """Transformers takes them too, and some checkpoints name end tokens that the model does not have."""
    ids = torch.tensor([prompt_of(9)])
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, **options}
    assert torch.equal(engine.generate(ids, **how).sequences, TARGET.generate(ids, **how))


def test_an_empty_list_of_end_tokens_ends_no_text(engine) -> None:
    out = engine.generate([prompt_of(9), prompt_of(5)], max_new_tokens=3, eos_token_id=[])
    assert out.new_tokens == [3, 3]


def test_none_for_numbers_of_texts(engine) -> None:
    options: dict[str, Any] = {"num_beams": None, "num_return_sequences": None, "length_penalty": None}
    assert engine.generate(prompt_of(9), max_new_tokens=3, **options).new_tokens == 3


def test_options_that_leave_no_token(engine) -> None:
    options: dict[str, Any] = {"suppress_tokens": list(range(VOCABULARY)), "do_sample": True, "seed": 1}
    with pytest.raises(ValueError, match=says("no token", "forbidden (SuppressTokens", "or the model")):
        engine.generate(prompt_of(9), max_new_tokens=3, **options)


def answering(answer: Callable[[Any], Any], keeps_state: bool) -> Any:
    """Returns a logits processor or stopping criterion that answers with a function of the scores."""

    class Own:
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return answer(scores)

    own: Any = Own()
    own.keeps_state = keeps_state
    return own


callers = pytest.mark.parametrize(("keeps_state", "beams"), [(False, 1), (True, 1), (True, 2)])


@callers
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda scores: None, "a NoneType"),
        (lambda scores: scores.tolist(), "a list"),
        (lambda scores: scores[0], f"a tensor of shape ({VOCABULARY},), float32"),
        (lambda scores: scores[:, :9], "a tensor of shape ({rows}, 9), float32"),
        (lambda scores: scores.long(), f"a tensor of shape ({{rows}}, {VOCABULARY}), int64"),
        (lambda scores: scores > 0, f"a tensor of shape ({{rows}}, {VOCABULARY}), bool"),
    ],
)
def test_what_a_processor_may_not_return(
    engine, answer: Callable[[Any], Any], kind: str, keeps_state: bool, beams: int
) -> None:
    expected = engine.generate(prompt_of(9), max_new_tokens=3, do_sample=False).sequences
    own = answering(answer, keeps_state)
    with pytest.raises(
        ValueError, match=says(f"Own returned {kind.format(rows=beams)}", f"of shape ({beams}, {VOCABULARY})")
    ):
        engine.generate(
            prompt_of(9), max_new_tokens=3, do_sample=False, logits_processor=[own], num_beams=beams
        )
    out = engine.generate(prompt_of(9), max_new_tokens=3, do_sample=False)
    assert torch.equal(out.sequences, expected)


@callers
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_scores_that_nothing_can_be_drawn_from(engine, number: float, keeps_state: bool, beams: int) -> None:
    own = answering(lambda scores: torch.full_like(scores, number), keeps_state)
    with pytest.raises(ValueError, match=says("NaN", "a logits processor (Own)", "leave")):
        engine.generate(
            prompt_of(9), max_new_tokens=3, do_sample=True, seed=1, logits_processor=[own], num_beams=beams
        )


@callers
@pytest.mark.parametrize("answer", [None, "no", 0.5, torch.tensor([True, False]), torch.empty(0).bool()])
def test_what_a_stopping_criterion_may_not_answer(engine, answer: Any, keeps_state: bool, beams: int) -> None:
    own = answering(lambda _: answer, keeps_state)
    count = 1 if beams == 1 else 2 * beams
    with pytest.raises(ValueError, match=says("Own answered", "True or False", f"shape ({count},)")):
        engine.generate(
            prompt_of(9), max_new_tokens=3, do_sample=False, stopping_criteria=[own], num_beams=beams
        )


@callers
def test_a_stopping_criterion_may_answer_with_a_column(engine, keeps_state: bool, beams: int) -> None:
    own = answering(lambda _: torch.zeros(1 if beams == 1 else 2 * beams, 1, dtype=torch.bool), keeps_state)
    out = engine.generate(
        prompt_of(9), max_new_tokens=3, do_sample=False, stopping_criteria=[own], num_beams=beams
    )
    assert out.new_tokens == 3


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("answer", [None, {5}, "ab", 7, [], [VOCABULARY], [[5]]])
def test_what_allowed_tokens_may_not_be(engine, answer: Any, beams: int) -> None:
    options: dict[str, Any] = {"prefix_allowed_tokens_fn": lambda *_: answer, "num_beams": beams}
    with pytest.raises(ValueError, match=says("prefix_allowed_tokens_fn returned", f"below {VOCABULARY}")):
        engine.generate(prompt_of(9), max_new_tokens=3, do_sample=False, **options)


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_beams": 2}, {"num_beams": 2, "do_sample": True}]
)
def test_logits_that_are_nan(options: dict[str, Any]) -> None:
    model = copy.deepcopy(TARGET)
    model.lm_head.weight.data[3] = math.nan
    engine = triforce_tree.load(model)
    with pytest.raises(ValueError, match=says("the model returned NaN logits", "check the checkpoint")):
        engine.generate(prompt_of(9), max_new_tokens=3, **options)
    out = engine.generate(prompt_of(9), max_new_tokens=3, remove_invalid_values=True, **options)
    assert out.new_tokens == 3


@pytest.mark.parametrize("name", ["generate", "config"])
def test_an_empty_stop_string(name: str) -> None:
    engine = triforce_tree.load(TARGET, tokenizer=characters())
    options: dict[str, Any] = {"stop_strings": ""}
    if name == "config":
        options = {"generation_config": {"stop_strings": ""}}
    with pytest.raises(ValueError, match=says("stop_strings holds ''", "at least one character")):
        engine.generate(prompt_of(9), max_new_tokens=3, **options)


def test_numbers_of_numpy(engine) -> None:
    options = {"temperature": np.float32(0.5), "top_p": np.float32(0.5), "max_new_tokens": np.int64(5)}
    drawn = engine.generate(prompt_of(9), seed=1, **options).sequences
    options = {"temperature": 0.5, "top_p": 0.5, "max_new_tokens": 5}
    assert torch.equal(engine.generate(prompt_of(9), seed=1, **options).sequences, drawn)


def test_different_vocabularies() -> None:
    with pytest.raises(ValueError, match=says(50, VOCABULARY, "choose another draft")):
        triforce_tree.load(TARGET, tiny("llama", vocab_size=50))


@pytest.mark.parametrize(
    ("temperature", "limit"),
    [(-0.1, "at least 0"), (math.nan, "at least 0"), (math.inf, "at least 0"), (1e-40, "below 1e-30")],
)
def test_temperature(engine, temperature: float, limit: str) -> None:
    with pytest.raises(ValueError, match=says(f"temperature={temperature}", limit, "means greedy")):
        engine.generate([1], temperature=temperature, max_new_tokens=3)


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(("name", "value"), [("top_p", 1.5), ("top_p", -0.1), ("top_k", -3)])
def test_sampling_options_out_of_range(engine, name: str, value: float, temperature: float) -> None:
    with pytest.raises(ValueError, match=says(f"{name}={value}", "keeps all tokens")):
        engine.generate([1], temperature=temperature, max_new_tokens=3, **{name: value})


def test_contradictory_temperature(engine) -> None:
    with pytest.raises(ValueError, match=says("temperature=0", "do_sample=True", "choose one")):
        engine.generate([1], temperature=0, do_sample=True, max_new_tokens=3)


BAD_OPTIONS = [
    ({"budget": 4100, "chunk": 8}, ("budget=4100", "multiple of chunk=8", "budget=4096")),
    ({"budget": 5, "chunk": 8}, ("budget=5", "chunk of sinks (8)", "budget>=264")),
    ({"budget": 512, "recent": 512}, ("budget=512", "recent=512", "budget>=520", "smaller recent")),
    ({"recent": 4, "chunk": 8}, ("recent=4", "chunk=8", "recent>=8")),
    ({"budget": 0}, ("budget=0", "at least 1")),
    ({"chunk": -8}, ("chunk=-8", "at least 1")),
    ({"refresh": -1}, ("refresh=-1", "at least 0")),
    ({"recent": 2.5}, ("recent=2.5", "integer")),
    ({"gamma": 0}, ("gamma=0", "at least 1")),
    ({"gamma": True}, ("gamma=True", "integer")),
    ({"sinks": -1}, ("sinks=-1", "at least 0")),
    ({"window": 0}, ("window=0", "at least 1")),
    ({"prefill_chunk": 0}, ("prefill_chunk=0", "at least 1")),
    ({"gamma": 10**9}, ("gamma=1000000000", "at most 1024")),
    ({"rounds": 10**9}, ("rounds=1000000000", "at most 1024")),
    ({"window": 10**9}, ("window=1000000000", "at most 1048576")),
    ({"sinks": 10**9}, ("sinks=1000000000", "at most 1048576")),
    ({"budget": 8 * 10**9}, ("budget=8000000000", "at most 1048576")),
    ({"recent": 10**9}, ("recent=1000000000", "at most 1048576")),
    ({"chunk": 10**9}, ("chunk=1000000000", "at most 1048576")),
    ({"refresh": 10**9}, ("refresh=1000000000", "at most 1048576")),
    ({"prefill_chunk": 10**12}, ("prefill_chunk=1000000000000", "at most 1048576")),
    ({"tree": "chain:100000"}, ("tree='chain:100000'", "at most 1024", "use a smaller one")),
    ({"runner_ups": 1}, ("runner_ups=1", "True, False or None")),
    ({"tree": 5}, ("tree=5", "chain:4")),
    ({"levels": 4}, ("levels=4", "1, 2, 3 or 'auto'")),
    ({"levels": "all"}, ("levels='all'", "auto")),
    ({"tree": "bush:3"}, ("tree='bush:3'", "chain:4")),
    ({"gama": 3}, ("unknown option 'gama'", "did you mean 'gamma'?")),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_settings(options: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=says(*words)):
        triforce_tree.load(TARGET, **load_arguments(options))


LOOKUP_TREE = says("tree='chain:3'", "suffix matching proposes chains", "draft model")
OWN_TREE = says("tree='chain:3'", "drafter 'fixed' has a tree of its own", "change drafter.tree")


@pytest.mark.parametrize("drafter", [None, "lookup", FixedSiblings("static:0;1", VOCABULARY)])
def test_tree_is_refused_where_a_drafter_has_its_own(drafter: Any) -> None:
    message = OWN_TREE if isinstance(drafter, FixedSiblings) else LOOKUP_TREE
    for call in (
        lambda: triforce_tree.load(TARGET, drafter=drafter, tree="chain:3"),
        lambda: triforce_tree.custom_generate(drafter=drafter, tree="chain:3"),
        lambda: triforce_tree.load(TARGET, drafter=drafter).with_options(levels=2, tree="chain:3"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_matched_tokens_take_the_place_of_the_trees_of_the_users_own_drafter() -> None:
    own = FixedSiblings("static:0;1", VOCABULARY)
    engine = triforce_tree.load(TARGET, drafter=own, advanced={"other_trees": "lookup:9 lookup:4"})
    assert engine.config.trees == ("static:0;1", "lookup:4", "lookup:9")
    assert engine.with_options(advanced={"rounds": 1}).config.shapes == ("static:0;1",)
    with pytest.raises(ValueError, match=says("other_trees='chain:2 lookup:4'", "drafter 'fixed' has")):
        triforce_tree.load(TARGET, drafter=own, advanced={"other_trees": "chain:2 lookup:4"})


def test_the_draft_model_must_be_there_where_it_is_named() -> None:
    with pytest.raises(ValueError, match=says("drafter='model' needs a draft", "drafter='lookup'")):
        triforce_tree.custom_generate(drafter="model")


def test_flat_options_and_records_are_the_same_settings() -> None:
    config = HierarchyConfig(
        gamma=5, streaming=StreamingConfig(window=7), retrieval=RetrievalConfig(refresh=5)
    )
    assert HierarchyConfig.from_options(**config.as_options()) == config
    assert HierarchyConfig.from_options() == HierarchyConfig()


def test_missing_folder(tmp_path: Path) -> None:
    for source in (tmp_path / "nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(FileNotFoundError, match=says("no such folder", "nowhere")):
            triforce_tree.load(source)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=says("config.json", "not a folder")):
        triforce_tree.load(folder / "config.json")


def test_missing_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=says(folder, "no weights", "save_pretrained")):
        triforce_tree.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=says(folder, "no config.json")):
        triforce_tree.load(TARGET, folder)


def test_pickle_in_place_of_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(TARGET.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=says("only pytorch_model.bin", "pickle", "safetensors")):
        triforce_tree.load(folder)


def test_weights_that_exceed_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(ValueError, match=says("weights of", "GiB, more than cpu has left", "smaller model")):
        triforce_tree.load(folder, device="cpu")


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_corrupt_checkpoint(folder: Path, damage: str) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes({"truncated": content[:-1000], "garbage": b"x" * 500, "empty": b""}[damage])
    with pytest.raises(OSError, match=says(folder, "corrupt", "copy or download it again")):
        triforce_tree.load(folder)


def test_a_checkpoint_without_some_weights(folder: Path) -> None:
    """Weights that transformers would fill in at random are an error, not a warning."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(OSError, match=says(folder, "model.layers.1.mlp.up_proj.weight")):
        triforce_tree.load(folder)


def test_weights_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def guarded(path: Path, *mode: str, own: Any = Path.open, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return own(path, *mode, **options)

    monkeypatch.setattr(Path, "open", guarded)
    with pytest.raises(PermissionError, match=says("Permission denied", "model.safetensors")):
        triforce_tree.load(folder)


@pytest.mark.parametrize("dtype", ["float99", "Tensor", 5])
def test_an_unknown_dtype_is_named(folder: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=says(f"dtype={dtype!r} is unknown", "use float32, bfloat16")):
        triforce_tree.load(folder, dtype=dtype)


def test_a_sound_folder_loads_and_generates(folder: Path) -> None:
    out = triforce_tree.load(folder, folder).generate(prompt_of(20), max_new_tokens=5, do_sample=False)
    expected = TARGET.generate(torch.tensor([prompt_of(20)]), max_new_tokens=5, do_sample=False)
    assert out.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("count", [0, -3])
def test_no_new_tokens(engine, count: int) -> None:
    with pytest.raises(ValueError, match=says("max_new_tokens", count)):
        engine.generate([1], max_new_tokens=count)
