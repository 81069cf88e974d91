"""``triforce-tree chat``: questions about a document, one after the other; only new tokens are prefilled."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import StoppingCriteriaList

from triforce_tree.check.compare import ms_per_token, prompt_count
from triforce_tree.cli import options
from triforce_tree.cli.console import Interrupt, PinningBar, PrefillBar, TextOut, json_line, screen
from triforce_tree.engine import Engine
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.runtime.devices import memory_is_short
from triforce_tree.runtime.files.text_files import read_text
from triforce_tree.runtime.stats import rate_text
from triforce_tree.sessions.session import Session

COMMANDS = "/quit, /reset, /save FOLDER, /help"


def run(args: argparse.Namespace) -> int:
    document = "" if args.file is None else read_text(args.file).rstrip()
    seed = options.seed_of(args)
    engine = options.engine_of(args, document, args.max_new_tokens)
    if args.system is not None and not _has_template(engine):
        raise ValueError("--system needs a tokenizer with a chat template; put the text into --file")
    more = {"max_new_tokens": args.max_new_tokens, **options.sampling_of(args, engine)}
    chat = _Chat(engine, document, args.system, seed, more)
    if args.load is not None:
        chat.session = engine.load_session(args.load)
        screen().print(f"{len(chat.session.tokens):,} tokens read from {args.load}")
    code = 0
    try:
        for line in _lines():
            if line.partition(" ")[0] == "/quit":
                break
            # The conversation goes on; without a terminal the exit code tells of the first failure.
            failure = chat.answer(line)
            code = code or (0 if sys.stdin.isatty() else failure)
    except KeyboardInterrupt:
        screen().print("interrupted")
        code = 130
    if args.json:
        json_line({"seed": seed, "turns": chat.turns, "tokens": len(chat.session.tokens)})
    return code


class _Chat:
    """A conversation about a document, by the tokenizer's chat template if it has one, else as plain text.

    Args:
        system: the system message; None for none.
        seed: seed of the first answer.
        more: arguments of :meth:`Session.generate`.

    Attributes:
        session: the conversation so far.
        turns: the answers so far, those before a reset included.
    """

    def __init__(
        self, engine: Engine, document: str, system: str | None, seed: int, more: dict[str, Any]
    ) -> None:
        self._engine, self._document, self._seed, self._more = engine, document, seed, more
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, Any]] = []
        self._reset()

    def _reset(self) -> None:
        """Forgets everything except the document, whose keys and values stay in the buffers."""
        if _has_template(self._engine):
            self.session: Session = self._engine.session(self._system or None)
        else:
            self.session = self._engine.session(self._document or None)

    def _ask(self, question: str) -> None:
        """Streams the answer to stdout, which Ctrl-C ends."""
        assert self._engine.tokenizer is not None
        asked: Any = f"\n\n{question}\n" if self.session.tokens else f"{question}\n"
        if self.session.messages is not None or _has_template(self._engine):
            first = not self.session.messages or self.session.messages == self._system
            before = f"{self._document}\n\n" if first and self._document else ""
            asked = [{"role": "user", "content": before + question}]
        tokens = len(self.session.prompt(asked))
        with (
            Interrupt() as interrupt,
            PrefillBar(tokens - 1, interrupt) as progress,
            PinningBar(0, interrupt) as pinned,
        ):
            out = self.session.generate(
                asked,
                stopping_criteria=StoppingCriteriaList([interrupt]),
                streamer=TextOut(self._engine.tokenizer),
                progress=progress,
                pinned=pinned,
                # A seed of its own for each answer, the same in every run.
                seed=self._seed + len(self.turns),
                **self._more,
            )
        self.turns.append(_turn(question, out, interrupt.requested))
        screen().print(_summary(out))

    def answer(self, line: str) -> int:
        """Executes a line, or prints why this is impossible. Returns 0, or the exit code of the failure."""
        try:
            self._do(line)
            return 0
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            screen().print(str(error))
            return 2
        except KeyboardInterrupt:
            screen().print("interrupted; the conversation goes on")
            return 130
        except (RuntimeError, MemoryError) as error:
            if not memory_is_short(error):
                raise
            why = " ".join(str(error).split()) or type(error).__name__
            screen().print(f"out of memory ({why}); the conversation is as it was before this line")
            return 1

    def _do(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._reset()
        elif name == "/help":
            screen().print(f"a line is a question; commands: {COMMANDS}")
        elif name == "/save" and (folder := rest.strip()):
            self.session.save(Path(folder))
            screen().print(f"saved in {folder}")
        elif name.startswith("/"):
            raise ValueError(f"{name} is no command; there are {COMMANDS}")
        else:
            self._ask(line)


def _has_template(engine: Engine) -> bool:
    return bool(getattr(engine.tokenizer, "chat_template", None))


def _lines() -> Iterator[str]:
    """Yields the lines that are typed, or those of stdin if it is not a terminal, without empty lines."""
    if not sys.stdin.isatty():
        # The first one may begin with a byte order mark.
        lines = (line.strip().removeprefix("\ufeff") for line in sys.stdin)
        yield from (line for line in lines if line)
        return
    show = screen()
    show.print(f"ask about the text; {COMMANDS}; Ctrl-C ends an answer")
    while True:
        try:
            line = show.input("> ").strip()
        except EOFError:
            return
        if line:
            yield line


def _summary(out: GenerateOutput) -> str:
    ms = ms_per_token(out)
    speed = f" at {rate_text(1e3 / ms)} a second" if ms else ""
    cut = ", cut by --max-new-tokens" if out.finish_reason == "length" else ""
    read = f"{out.reused_tokens:,} of {prompt_count(out):,} prompt tokens kept"
    return f"{out.new_tokens} tokens{speed}{cut}; {read}, the others prefilled in {out.prefill_seconds:.1f} s"


def _turn(question: str, out: GenerateOutput, interrupted: bool) -> dict[str, Any]:
    return {
        "question": question,
        "text": out.text,
        "prompt_tokens": prompt_count(out),
        "new_tokens": out.new_tokens,
        "reused_tokens": out.reused_tokens,
        "prefill_seconds": out.prefill_seconds,
        "ms_per_token": ms_per_token(out),
        "finish_reason": out.finish_reason,
        "interrupted": interrupted,
    }
