"""``triforce-tree bench serve``: sends requests to a server, and measures when their tokens come."""

import argparse
import asyncio
import itertools
import os
from collections.abc import Iterable, Iterator

from triforce_tree.bench import load
from triforce_tree.bench.load import Endpoint, Load, Sent
from triforce_tree.bench.results import Record, header
from triforce_tree.cli.bench.running import finish, records_of, series_of
from triforce_tree.cli.console import Interrupt, bar, json_line
from triforce_tree.cli.texts import documents

# Characters after which no further document of a data set is read.
_MOST_TEXT = 4_000_000
# Requests of a measurement: for each client, and with a rate.
_BY_CLIENT, _BY_RATE = 4, 32


def run(args: argparse.Namespace) -> int:
    source, found = documents(args)
    text = "\n\n".join(_first(found))
    # No option, since results files have the command.
    key = os.environ.get("OPENAI_API_KEY") or None
    model = args.model or asyncio.run(load.model_of(args.url, key))
    endpoint = Endpoint(args.url, model, key, args.chat, dict(args.field))
    settings = {
        "benchmark": "serve", "url": args.url, "model": model, "chat": args.chat,
        "fields": endpoint.fields, "new_tokens": args.new_tokens, "pause": args.pause,
        "seconds": args.seconds, "seed": args.seed, "text": source,
    }  # fmt: skip
    records, loads = records_of(args, settings), list(_loads(args))
    size = asyncio.run(load.characters_per_token(endpoint, text))
    progress = bar("measurements")
    task = progress.add_task("sending", total=len(loads))

    with Interrupt() as interrupt, progress:

        def measured(key: Record) -> Record:
            own, ended = (
                Load(**key, pause=args.pause, seconds=args.seconds, seed=args.seed),
                itertools.count(1),
            )

            def told(sent: Sent) -> None:
                done = f"{next(ended)} of {own.requests} requests"
                progress.update(task, description=f"{_name(key)}: {done}")

            given = load.prompts(text, own.requests, round(size * own.prompt_tokens), f"{args.seed} {key}")
            sent = asyncio.run(load.send(endpoint, given, own, told, lambda: interrupt.requested))
            return load.summary(sent) | {"sent": [each.as_row() for each in sent]}

        series_of(args, records, interrupt, (progress, task), _said).fill(loads, measured)
    code = finish(args, records, [load.table(records.all)] if records.all else [], interrupt.requested)
    if args.json:
        rows = [{name: value for name, value in record.items() if name != "sent"} for record in records.all]
        json_line({**header(args.seed), "interrupted": interrupt.requested, "rows": rows})
    # Some requests of a load may be refused, but not all of them.
    return code or int(not all(record["complete"] or record["cut"] for record in records.all))


def _loads(args: argparse.Namespace) -> Iterator[Record]:
    """Yields the values of a :class:`Load` that differ between measurements."""
    for length in args.prompt_tokens:
        shared = {"prompt_tokens": length, "new_tokens": args.new_tokens}
        for rate in args.rate or ():
            yield {**shared, "requests": args.requests or _BY_RATE, "clients": None, "rate": rate}
        for clients in () if args.rate else args.clients or (1,):
            wanted = args.requests or _BY_CLIENT * clients
            yield {**shared, "requests": wanted, "clients": clients, "rate": None}


def _first(found: Iterable[str]) -> Iterator[str]:
    """Yields the first documents."""
    characters = 0
    for text in found:
        yield text
        characters += len(text)
        if characters >= _MOST_TEXT:
            return


def _name(key: Record) -> str:
    return f"{load.load_name(key)}, {key['prompt_tokens']:,} tokens"


def _said(record: Record) -> str:
    rate, first = record["tokens_per_second"], record["first_token_seconds"]
    waited = "" if first is None else f", first token after {first['p50']:.2f} s"
    failed = f", {record['failed']} failed" if record["failed"] else ""
    return f"{_name(record)}: {rate:,.1f} tokens/s{waited}{failed}"
