"""Level 1 by weights of 8 bits on a CPU: where it gains, and that it is chosen by itself."""

import pytest

from tests.support.models.families import greedy, prompt_of, tiny
from tests.support.models.program_cases import SMALL, draft_of
from triforce_tree import load
from triforce_tree.config import load_arguments
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models import few_row
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.host.linears import Int8Linear
from triforce_tree.planning import device_defaults
from triforce_tree.planning.device_defaults import gains_from_few_bits

pytestmark = pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")

NEW, PROMPT = 12, prompt_of(50)


def test_what_gains_from_few_bits_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama-gqa")
    assert not gains_from_few_bits(HFModel(model)), "its layers are small"
    monkeypatch.setattr(device_defaults, "_LEAST_LAYER_CPU", 1 << 10)
    assert gains_from_few_bits(HFModel(model))
    monkeypatch.setattr(few_row, "library", lambda: None)
    assert not gains_from_few_bits(HFModel(model)), "nothing multiplies by them"


def test_a_cpu_takes_eight_bits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option asks for it, and the text stays the target's."""
    monkeypatch.setattr(device_defaults, "_LEAST_LAYER_CPU", 1 << 10)
    monkeypatch.setattr(device_defaults, "_LEAST_UNUSED", 0)
    monkeypatch.setattr(device_defaults, "_UNUSED", 0.0)
    settings = {name: value for name, value in SMALL.items() if name != "retrieval_weight_bits"}
    target = tiny("llama-gqa")
    engine = load(target, draft_of("llama-gqa"), **load_arguments(settings))
    out = engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == greedy(target, PROMPT, NEW)
    assert out.levels[1].accepted > 0
    program = engine.last_program
    assert program is not None
    assert program.config.retrieval_weight_bits == 8
    linears = [m for m in program.retrieval_model.model.modules() if isinstance(m, Int8Linear)]
    assert len(linears) == 7 * len(engine.target.model.model.layers) + 1, "and the head"
