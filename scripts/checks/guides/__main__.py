"""Run the commands and the code of docs/guides as they are written, the embedded pair for all models.

    python -m scripts.checks.guides                    # all pages: ten minutes on two cores
    python -m scripts.checks.guides own_model server

A page runs in an empty folder of its own, where ``.venv`` and ``examples`` are those of this clone and
``path/to/...`` are the embedded pair. Left out: what installs, and code for a GPU where there is none; the
environment has the extra ``test``, with what the server and its clients need. A server that is started
without ``path/to`` runs until the page ends. Exit code 1 where anything fails; the last line is JSON.
"""

import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from scripts.checks.guides import BLOCK
from scripts.checks.report import ROOT, Report, parser

GUIDES = ROOT / "docs" / "guides"
PAIR = ROOT / "triforce_tree" / "pair"
MODELS = {"target": "target", "7b": "target", "13b": "target", "draft": "draft"}
_SERVER = re.compile(r"^triforce-tree serve\b.*$", re.MULTILINE)
_STARTED, _ENDED = 120, 900  # seconds


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Returns (language, code) of a page's blocks that can be run here, in their order; shell without a
    language.
    """
    for language, code in BLOCK.findall(page):
        installs = code.startswith(("pip install", "make "))
        needs_gpu = '"cuda"' in code and not torch.cuda.is_available()
        if language in ("", "python") and not installs and not needs_gpu:
            yield language, code


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder as a reader's clone after ``make demo``, with models where the guides have them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "path" / "to").mkdir(parents=True)
        for model, part in MODELS.items():
            (folder / "path" / "to" / model).symlink_to(PAIR / part)
        yield folder


def run_block(language: str, code: str, folder: Path) -> dict[str, Any]:
    """Runs a block to its end; what it printed last, where it failed."""
    words = (
        [sys.executable, "-c", code] if language else ["bash", "-ec", f"source .venv/bin/activate\n{code}"]
    )
    start = time.perf_counter()
    done = subprocess.run(
        words, cwd=folder, stdin=subprocess.DEVNULL, timeout=_ENDED, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    found = {"passed": done.returncode == 0, "seconds": round(time.perf_counter() - start, 1)}
    return found if found["passed"] else found | {"output": done.stdout[-2000:]}


@contextmanager
def server(command: str, folder: Path) -> Iterator[None]:
    """A server that answers, until the context is left."""
    words = ["bash", "-c", f"source .venv/bin/activate; exec {command}"]
    process = subprocess.Popen(words, cwd=folder, stdin=subprocess.DEVNULL)
    port = found[1] if (found := re.search(r"--port (\d+)", command)) else "8000"
    try:
        end = time.monotonic() + _STARTED
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command}: no answer on port {port}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait()


def _answers(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run_page(page: str, report: Report) -> None:
    """Runs a page's blocks, the first line of each as its name."""
    with workplace() as folder, ExitStack() as running:
        for language, code in blocks((GUIDES / f"{page}.md").read_text("utf-8")):
            name = f"{page}: {code.strip().splitlines()[0]}"
            for command in _SERVER.findall(code):
                running.enter_context(server(command, folder))
            rest = _SERVER.sub("", code)
            report.attempt(name, lambda rest=rest, language=language: run_block(language, rest, folder))


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    pages = sorted(path.stem for path in GUIDES.glob("*.md"))
    made.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(pages)}; by default all")
    args = made.parse_args(words)
    if unknown := set(args.pages) - set(pages):
        made.error(f"there is no guide {', '.join(sorted(unknown))}; there are {', '.join(pages)}")
    report = Report()
    for page in args.pages or pages:
        run_page(page, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
