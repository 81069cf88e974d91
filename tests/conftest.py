"""Sets up what all tests share: no network, few threads, fixed seeds, poisoned memory, markers."""

import gc
import importlib
import itertools
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.support.kernels import quick_interpreter

if TYPE_CHECKING:
    from tests.support.models.tiny_pair import TinyPair
    from triforce_tree import Engine

# Tests use tiny tensors, and two threads that meet after every such operation are hundreds of times
# slower than one where something else keeps a core busy.
THREADS = 1
ROOT = Path(__file__).parents[1]
SAMPLED = 2
"""Parameter sets of one test that are run with ``--sample``; with three, two cores take over 15 minutes."""

_SERVER = ("aiohttp", "openai", "prometheus_client", "starlette", "uvicorn")
# Folders and files with packages of the extra `test` that their tests need; without these they are not
# collected.
NEEDED = {
    "server": _SERVER,
    "gpu/test_grammar.py": ("xgrammar",),
    "gpu/test_serving.py": _SERVER,
    "grammar": ("jsonschema", "xgrammar"),
    "grammar/test_served.py": _SERVER,
    "decoding/test_grammar_distributions.py": ("xgrammar",),
}
MISSING = {
    place: missing for place, names in NEEDED.items() if (missing := [n for n in names if not find_spec(n)])
}
collect_ignore = [*MISSING]

# Modules of tests compute what they expect when they are collected.
torch.set_num_threads(THREADS)
# Helper modules whose assertions report values, as those of the tests do.
for _name in ("api_cases", "program_cases"):
    pytest.register_assert_rewrite(f"tests.support.models.{_name}")
# Read once, when transformers, datasets and triton are first imported: by the tests, later.
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.setdefault(_name, "1")
# A GPU is used with ``-m gpu`` alone: without it the tests are the same on every machine. Triton reads how
# its kernels run when it is first imported, which a conftest.py of a folder does before ``pytest_configure``.
# Workers of xdist inherit what is decided here.
_MARKS = [mark for option, mark in itertools.pairwise(sys.argv) if option == "-m"]
if "PYTEST_XDIST_WORKER" not in os.environ and not any(
    "gpu" in mark and "not gpu" not in mark for mark in _MARKS
):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# From version 9 on pytest also captures loggers that do not propagate. This one gets a thousand empty records
# from each compilation, which are meant for a file.
logging.getLogger("torch.__trace").addFilter(lambda record: False)
# torch looks up the functions that a device context redirects once in a process. This must happen before a
# test replaces one of them: otherwise ``torch.device("meta")`` would allocate whole models from then on.
with torch.device("meta"):
    torch.empty(0)
# Nothing is read from the user's cache folder or written there. Workers of xdist inherit the folder.
_OWN_CACHE = None if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="triforce-tree-tests-")
if _OWN_CACHE:
    os.environ["TRIFORCE_TREE_CACHE"] = _OWN_CACHE


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "has no effect without pytest-timeout")
    parser.addoption(
        "--sample",
        action="store_true",
        help=f"run only {SAMPLED} parameter sets of each test, and none for a release",
    )


def pytest_report_header() -> list[str]:
    return [f"tests/{place} is left out without {', '.join(names)}" for place, names in MISSING.items()]


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("kernels") and torch.cuda.is_available():
        item.add_marker("gpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sample"):
        kept = sampled(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    # Files with slow tests come first, then those with many: one that begins last keeps one worker alone.
    slow = {item.path for item in items if "slow" in item.keywords}
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -counts[item.path]))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and pytest's option -m gpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


# The test file and the number of modules at the time of the last freeze.
_frozen: tuple[Path | None, int] = (None, 0)


def sampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns ``SAMPLED`` parameter sets of each test, the first and the last among them; the first of a test
    with slow ones, and none of those for a release.
    """
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "release" not in item.keywords:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    steps = SAMPLED - 1
    return {
        found[number * (len(found) - 1) // steps]
        for found in by_test.values()
        for number in range(1 if any("slow" in item.keywords for item in found) else SAMPLED)
    }


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keeps what the last file has left, and modules imported since, out of garbage collections.

    The engine collects garbage whenever it lets go of a cache, and would look through all modules: a quarter
    of a second, several times a test.
    """
    global _frozen
    path, modules = _frozen
    if item.path != path or len(sys.modules) > modules + 20:
        gc.collect()
        gc.freeze()
        _frozen = item.path, len(sys.modules)


def pytest_runtest_call() -> None:
    # Fixtures have imported it, where a test needs it.
    quick_interpreter.install_if_loaded()


def pytest_sessionfinish() -> None:
    # Libraries report what is left at the very end.
    gc.unfreeze()
    if _OWN_CACHE:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    """Fixes seeds and threads, and restores torch's global settings if a test changed them."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    torch.set_num_threads(THREADS)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for libraries that draw from the global state
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


@pytest.fixture(autouse=True)
def _a_clock_that_counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading of the clock is 2**-6 seconds after the last one, however busy the machine is.

    Measured times decide about rounds of drafting, settings that are tried, and figures in tables. Tests on a
    GPU have the real clock.
    """
    if request.node.get_closest_marker("gpu"):
        return
    readings = itertools.count(1)
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings) / 64)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> "TinyPair":
    """Model folders that are only read; made once, for whoever asks."""
    from tests.support.models import tiny_pair  # brings transformers, which most tests do without

    return tiny_pair.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def engine(pair: "TinyPair") -> "Engine":
    """Returns the pair under settings for short prompts; a module that needs others has its own."""
    from tests.support.models.tiny_pair import SMALL

    return pair.load(**SMALL)


@pytest.fixture(scope="module")
def ids(engine: "Engine") -> list[int]:
    """Returns a prompt of 200 tokens."""
    from tests.support.models import tiny_pair

    return tiny_pair.prompt(engine, 200)


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    """Returns a text file that the command line continues."""
    path = tmp_path / "prompt.txt"
    path.write_text("The import statement finds a module and binds its name. " * 8, encoding="utf-8")
    return str(path)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of ``scripts`` by its name below it."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    return lambda name: importlib.import_module(f"scripts.{name}")


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN, so whoever reads a row before writing it is found out."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                with torch.no_grad():
                    tensor.fill_(torch.nan)
            return tensor

        return made

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
