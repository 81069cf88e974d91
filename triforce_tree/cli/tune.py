"""``triforce-tree tune``: the fastest settings for this machine, these models and this text."""

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress as Bar

import triforce_tree
from triforce_tree.cli import options
from triforce_tree.cli.console import Interrupt, bar, json_line, plain_table, results, screen
from triforce_tree.cli.groups import ENGINE_OPTIONS
from triforce_tree.cli.texts import documents
from triforce_tree.engine import Engine
from triforce_tree.eval.results import Record, Records, header
from triforce_tree.eval.text import prompts
from triforce_tree.planning import profiles
from triforce_tree.planning.profiles import Entry, Profile
from triforce_tree.runtime import fingerprint
from triforce_tree.runtime.files.writable import check_writable
from triforce_tree.runtime.stats import Progress
from triforce_tree.trees.shapes import save_shape
from triforce_tree.tune.plan import Plan, Watch
from triforce_tree.tune.tuner import Tuner


def run(args: argparse.Namespace) -> int:
    source, texts = documents(args)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    plan = Plan(
        sorted(set(args.context)), sorted(set(args.temperature)), args.new_tokens, args.prompts, args.seconds,
        args.seed, frozenset(args.given),
    )  # fmt: skip
    [tokens] = prompts(texts, engine.tokenizer, max(plan.contexts), 1)
    for context in plan.contexts:
        engine.hierarchy.target.check_length(context, args.new_tokens)
    if args.dry_run:
        return _dry_run(args, Tuner(engine, tokens, plan, Records(None, {})))
    profile = _profile(args, engine)
    assert profile.path is not None
    check_writable(profile.path)
    records = _records(args, profile, source)
    before, written = len(records.all), False
    progress = bar("seconds")
    with Interrupt() as interrupt, progress:
        tuner = Tuner(engine, tokens, plan, records, _watch(progress, args.seconds, interrupt))

        def found(entry: Entry) -> None:
            nonlocal profile, written
            # Half a search says little, and every later call would go by it.
            if interrupt.requested:
                return
            written = True
            profile = replace(profile.with_entry(entry), made=header(args.seed))
            profile.write()

        entries = tuner.entries(found)
    _show(entries, results(args))
    show = screen()
    if written:
        show.print(f"profile: {profile.path}; load() and triforce-tree generate use its settings")
    if entries and args.save_tree is not None:
        _save_tree(args.save_tree, entries[0])
    if not tuner.complete:
        why = "Ctrl-C" if interrupt.requested else f"--seconds {args.seconds:g}"
        fresh = len(records.all) - before
        kept = "" if written else "no profile was written; "
        show.print(
            f"ended by {why} after {fresh} new measurements; {kept}the same command continues from here"
        )
    if args.json:
        result: dict[str, Any] = {**header(args.seed), "profile": str(profile.path) if written else None}
        result |= {"complete": tuner.complete, "interrupted": interrupt.requested}
        json_line({**result, "entries": [asdict(entry) | {"speedup": entry.speedup} for entry in entries]})
    return 130 if interrupt.requested else 0


def _save_tree(path: str, entry: Entry) -> None:
    tree = entry.options.get("tree")
    if tree is None:
        screen().print("no tree was written: the fastest settings have none")
        return
    save_shape(path, tree)
    screen().print(f"the tree of these settings is in {path}; --tree {path} uses it")


def _profile(args: argparse.Namespace, engine: Engine) -> Profile:
    """The profile on disk, or an empty one."""
    target, drafter = engine.hierarchy.target.model, engine.hierarchy.draft
    draft = drafter.model if drafter is not None else None
    path = Path(args.out) if args.out else profiles.default_path(target, draft)
    if path is None:
        raise ValueError("TRIFORCE_TREE_PROFILES is empty, which means no folder for profiles; give --out")
    if not args.out:
        path.parent.mkdir(parents=True, exist_ok=True)
    empty = Profile(
        fingerprint.hardware(target.device),
        fingerprint.shape_of(target),
        fingerprint.shape_of(draft) if draft is not None else None,
        (),
        path=path,
    )
    if not path.is_file():
        return empty
    found = profiles.read(path)
    same = (found.hardware, found.target, found.draft) == (empty.hardware, empty.target, empty.draft)
    if not same:
        raise ValueError(
            f"{str(path)!r} is a profile of another machine or pair; give another --out, or delete it"
        )
    return found


def _records(args: argparse.Namespace, profile: Profile, source: str) -> Records:
    assert profile.path is not None
    path = profile.path.with_name(profile.path.stem + ".measured.jsonl")
    if args.fresh:
        path.unlink(missing_ok=True)
    settings: Record = {
        "benchmark": "tune",
        "hardware": profile.hardware,
        "target": profile.target,
        "draft": profile.draft,
        "versions": [triforce_tree.__version__, torch.__version__],
        "text": source,
        "new_tokens": args.new_tokens,
        "prompts": args.prompts,
        "seed": args.seed,
        "options": {name: getattr(args, name) for name in ENGINE_OPTIONS if name in args.given},
    }
    for name in ("tokenizer", "draft_tokenizer"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    return Records(path, settings)


def _watch(progress: Bar, seconds: float, interrupt: Interrupt) -> Watch:
    """A progress bar of the time, with what is measured and the last result."""
    start = time.perf_counter()
    task = progress.add_task("tuning", total=seconds)
    now = "tuning"

    def show(text: str) -> None:
        passed = min(time.perf_counter() - start, seconds)
        progress.update(task, description=text, completed=passed)

    def says(text: str) -> None:
        nonlocal now
        now = text
        show(text)

    def measured(record: Record) -> None:
        result = f"{record['ms_per_token']:.2f} ms" if "ms_per_token" in record else "too little memory"
        show(f"{now}: {result}: {_options_text(record['options'])}")

    def reading(tokens: int) -> Progress:
        had = 0

        def read(count: int) -> None:
            nonlocal had
            interrupt.check()
            had += count
            show(f"{now}: prefill, {100 * had / max(1, tokens):.0f} %")

        return read

    return Watch(says, measured, reading, lambda: not interrupt.requested)


def _dry_run(args: argparse.Namespace, tuner: Tuner) -> int:
    """Print what would be tried, and where the search would begin."""
    spaces = [tuner.space(context) for context in tuner.plan.contexts]
    for space in spaces:
        starts = space.starts()
        levels = [str(start["levels"]) for start in starts if start["levels"] != 1]
        rows = [("levels", levels[0] if levels else "1", " ".join([*levels, "1"]))]
        rows += [
            (c.name, str(starts[0][c.name]), " ".join(str(v) for v in c.values)) for c in space.coordinates()
        ]
        if space.draft and "tree" not in space.fixed:
            rows.append(("tree", "", "Sequoia's best sizes, once acceptance and stage times are measured"))
        if "other_trees" in starts[0]:
            rows.append(("other_trees", starts[0]["other_trees"], ""))
        title = f"{space.context:,} tokens, T={' '.join(f'{t:g}' for t in tuner.plan.temperatures)}"
        results(args).print(plain_table(title, ("option", "begins at", "tried"), rows))
    if args.json:
        tried = [
            {
                "context": space.context,
                "starts": space.starts(),
                "tried": {c.name: list(c.values) for c in space.coordinates()},
            }
            for space in spaces
        ]
        json_line({"dry_run": True, "temperatures": list(tuner.plan.temperatures), "contexts": tried})
    return 0


def _show(entries: list[Entry], out: Console) -> None:
    rows = [
        (
            f"{entry.context:,}",
            f"{entry.temperature:g}",
            f"{entry.plain_ms_per_token:.2f}",
            f"{entry.ms_per_token:.2f}",
            f"{entry.speedup:.2f}x",
            f"{100 * entry.repeated_8grams:.0f} %",
            _options_text(entry.options),
        )
        for entry in entries
    ]
    columns = ("context", "T", "ms/token alone", "tuned", "speed-up", "repeated 8-grams", "options")
    out.print(plain_table("the fastest settings", columns, rows))


def _options_text(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
