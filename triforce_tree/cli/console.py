"""Terminal output: results on stdout, progress and notes on stderr, and the JSON line for programs."""

import argparse
import copy
import json
import math
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from threading import Event, Thread
from types import FrameType
from typing import Any, Self

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from triforce_tree.decoding.origins import MATCHED
from triforce_tree.planning.memory_map import GIB
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.requests.streamers import TokenStreamer
from triforce_tree.runtime import distributed
from triforce_tree.runtime.stats import LevelStats, rate_text
from triforce_tree.text.new_text import NewText
from triforce_tree.text.vocabulary import Vocabulary

LOG_WIDTH = 120  # of tables where they go to no terminal
_SHORT = 24


class _Console(Console):
    """Shows text without markup, because paths and prompts may contain what rich takes for markup."""

    def __init__(self, stderr: bool) -> None:
        width = None if (sys.stderr if stderr else sys.stdout).isatty() else LOG_WIDTH
        quiet = not distributed.is_first_rank()
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, width=width, quiet=quiet)

    def on_broken_pipe(self) -> None:
        """Lets the command line end as it does for any other output whose reader has closed it."""
        raise BrokenPipeError


def screen() -> Console:
    """Returns the console for progress and notes, on stderr. It is quiet on all ranks but the first."""
    return _Console(stderr=True)


def results(args: argparse.Namespace) -> Console:
    """Returns the console for a command's results: stdout, or stderr with ``--json``, which writes its line
    to stdout.
    """
    if not args.json:
        with suppress(AttributeError):
            # Tokens may be characters that the encoding of a redirected stdout lacks.
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return _Console(stderr=args.json)


@contextmanager
def first_rank_stdout() -> Iterator[None]:
    """Returns a context in which only the first rank writes to stdout."""
    if distributed.is_first_rank():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


class _Bar(Progress):
    """A progress bar. Without a terminal it prints a line every ``every`` seconds, and one at the end."""

    def __init__(self, *columns: ProgressColumn, unit: str, every: float) -> None:
        super().__init__(*columns, console=screen())
        self._unit, self._every, self._ended = unit, every, Event()
        self._lines: Thread | None = None

    def start(self) -> None:
        super().start()
        if self._lines is None and not (self.console.is_terminal or self.console.quiet):
            self._lines = Thread(target=self._print_lines, daemon=True)
            self._lines.start()

    def stop(self) -> None:
        self._ended.set()
        if self._lines is not None:
            self._lines.join()
        super().stop()

    def _print_lines(self) -> None:
        begun = time.monotonic()
        while not self._ended.wait(self._every):
            passed = f"after {time.monotonic() - begun:,.0f} s"
            for task in self.tasks:
                total = "" if task.total is None else f" of {task.total:,.0f}"
                self.console.print(f"{task.description}: {task.completed:,.0f}{total} {self._unit} {passed}")


def bar(unit: str, every: float = 10.0) -> Progress:
    """Returns a progress bar on stderr. Without a terminal it prints a line every ``every`` seconds and at
    the end.
    """
    return _Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        _Speed(unit),
        TimeRemainingColumn(),
        unit=unit,
        every=every,
    )


class Interrupt(StoppingCriteria):
    """Handles Ctrl-C: the first press ends the generation after the current pass, a second press ends it at
    once.

    It is a context manager around the work, and a stopping criterion inside it.
    """

    # The flag is not a state of a text, so the criterion may be called for any token.
    keeps_state = False

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.requested, device=input_ids.device)

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed while there is no text to keep yet."""
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.check()
        self.requested = True


class _CallbackBar:
    """A callback that receives amounts of work: a bar, which begins with the first amount, and a check for
    Ctrl-C.

    Args:
        unit: the unit that the bar shows; ``size`` of the work's own units are one of it.
        total: the work to come; None if unknown.
        interrupt: of a generation, which may end here.
        what: the description.
    """

    def __init__(self, unit: str, size: int, total: int | None, interrupt: Interrupt | None, what: str):
        self._interrupt, self._size = interrupt, size
        self._left = math.inf if total is None else total
        self._bar = bar(unit)
        self._task = self._bar.add_task(what, total=None if total is None else max(1, total // size))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def __call__(self, amount: int) -> None:
        if self._interrupt is not None:
            self._interrupt.check()
        if self._left > 0:
            self._bar.start()  # only now: errors in the input come first, and need no bar
        self._left -= amount
        self._bar.advance(self._task, amount / self._size)
        if self._left <= 0:
            # Text follows on stdout, and must not share a terminal line with the bar.
            self._bar.stop()


class PrefillBar(_CallbackBar):
    """A ``progress`` callback for :meth:`triforce_tree.Engine.generate`."""

    def __init__(self, total: int, interrupt: Interrupt, what: str = "prefill") -> None:
        super().__init__("tokens", 1, total, interrupt, what)


class _Speed(TextColumn):
    """Shows units per second, over the last half minute; after the end over the whole time."""

    def __init__(self, unit: str) -> None:
        super().__init__("")
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(
            "" if speed is None else f"{rate_text(speed)} {self._unit}/s", style="progress.data.speed"
        )


class PinningBar(_CallbackBar):
    """A ``pinned`` callback: a progress bar of host memory as it is allocated, in bytes."""

    def __init__(
        self, total: int | None, interrupt: Interrupt | None = None, what: str = "allocating host memory"
    ) -> None:
        super().__init__("MiB", 1 << 20, total, interrupt, what)


class TextOut(TokenStreamer):
    """Streams the new text to stdout."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._new: NewText | None = None

    def put_prompt(self, tokens: Sequence[int], end_tokens: Collection[int]) -> None:
        self._new = NewText(Vocabulary(self._tokenizer), tokens, end_tokens)

    def put_tokens(self, tokens: Sequence[int]) -> bool:
        assert self._new is not None
        self.on_finalized_text("".join(map(self._new.put, tokens)))
        return False

    def end(self) -> None:
        assert self._new is not None
        self.on_finalized_text(self._new.end(), stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Writes text, and a newline at its end."""
        sys.stdout.write(encodable(text) + "\n" * stream_end)
        sys.stdout.flush()


class LevelText:
    """Writes new text to stdout. On a terminal each token has the colour of the level that proposed it.

    Args:
        tokenizer: the target's tokenizer.
        names: names of the levels as in ``SideBySide.origins``, the target's last.
        prompt: token ids that the text continues.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, names: Sequence[str], prompt: Sequence[int] = ()
    ) -> None:
        self._new = NewText(Vocabulary(tokenizer), prompt)
        self._console = Console(highlight=False, soft_wrap=True)
        colours = iter(("green", "yellow"))
        self._styles = {name: "cyan" if name == MATCHED else next(colours) for name in names[:-1]}
        self._styles[names[-1]] = "bold magenta"

    @property
    def legend(self) -> Text:
        """Returns the meaning of the colours; the text is empty without colours."""
        if not self._console.is_terminal or self._console.no_color:
            return Text()
        parts = Text("tokens proposed by: ")
        for name, style in self._styles.items():
            parts.append(f"{name}  ", style)
        return parts

    def put(self, tokens: Sequence[int], origins: Sequence[str]) -> None:
        """Writes tokens, each in the colour of the level that proposed it."""
        for token, origin in zip(tokens, origins, strict=True):
            self._write(self._new.put(token), self._styles.get(origin))

    def end(self) -> None:
        self._write(self._new.end() + "\n")

    def _write(self, text: str, style: str | None = None) -> None:
        if style is None or not self.legend:
            # The text is written without rich, which would expand tabs.
            self._console.file.write(encodable(text))
        else:
            self._console.print(Text(encodable(text), style), end="")
        self._console.file.flush()


def encodable(text: str) -> str:
    """Returns the text with "?" for each character that stdout cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def levels_table(levels: Sequence[LevelStats]) -> Table:
    """Returns a table of the statistics of each level, level 0 first."""
    columns = ("level", "passes", "proposed", "accepted", "rate", "emitted", "per pass", "seconds")
    return plain_table(
        "what each level did",
        columns,
        [
            (
                level.name,
                str(level.forwards),
                str(level.proposed or ""),
                str(level.accepted if level.proposed else ""),
                "" if level.acceptance_rate is None else f"{100 * level.acceptance_rate:.1f} %",
                str(level.emitted),
                "" if level.mean_accepted_length is None else f"{level.mean_accepted_length:.2f}",
                f"{level.seconds:.2f}",
            )
            for level in levels
        ],
    )


def memory_table(plan: MemoryPlan) -> Table:
    """Returns the memory map of a plan, and the settings chosen for it."""
    rows = [(f"device: {name}", f"{size / GIB:.2f}") for name, size in plan.device.items() if size]
    rows += [(f"host: {name}", f"{size / GIB:.2f}") for name, size in plan.host.items() if size]
    own = plan.config
    facts = "nothing is offloaded"
    if plan.offload is not None:
        facts = (
            f"bus {plan.machine.bus / 1e9:.1f} GB/s, {1e3 * plan.pass_seconds:.0f} ms for a pass of level 2"
        )
        if plan.weight_seconds:
            facts += f", {1e3 * plan.weight_seconds:.0f} ms of it for weights"
        if plan.cpu is not None:
            share = 100 * plan.offload.host_share
            facts += (
                f", the CPU attends to {share:.0f} % of the KV slots on the host ({plan.cpu / 1e9:.1f} GB/s)"
            )
    if plan.levels == 3:
        facts += f", budget {own.retrieval.budget}, chunk {own.retrieval.chunk}, gamma {own.gamma}"
        if own.retrieval_weight_bits != 16:
            facts += f", retrieval_weight_bits {own.retrieval_weight_bits}"
    if own.kv_bits != 16:
        facts += f", kv_bits {own.kv_bits}"
    table = plain_table("memory map", ("", "GiB"), rows)
    table.caption, table.caption_justify = facts, "left"
    return table


class _FittingTable(Table):
    """Omits its last columns where the terminal is too narrow for them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, wide = copy.copy(self), options.update(max_width=10 * LOG_WIDTH)
        while len(shown.columns) > 1 and shown.__rich_measure__(console, wide).minimum > options.max_width:
            shown.columns, shown.min_width = shown.columns[:-1], None
        yield from Table.__rich_console__(shown, console, options)
        if left_out := [str(column.header) for column in self.columns[len(shown.columns) :]]:
            yield Text(f"too narrow for: {', '.join(left_out)}")


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Returns a table whose first column is text and whose others are figures."""
    table = _FittingTable(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        min_width=len(title) + 2,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(columns):
        # Long cells may be wrapped, figures not.
        longest = max(len(cells[index]) for cells in (columns, *rows))
        least = longest if longest <= _SHORT else None
        table.add_column(name, justify="right" if index else "left", min_width=least)
    for row in rows:
        table.add_row(*row)
    return table


def json_line(result: dict[str, Any]) -> None:
    """Prints one object on one line, which is always the last line of stdout."""
    line = json.dumps(result, ensure_ascii=False)
    print(line if encodable(line) == line else json.dumps(result), flush=True)
