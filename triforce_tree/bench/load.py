"""Sends requests to an OpenAI endpoint at random times, and measures when their tokens come.

The endpoint may be any server with streamed completions or chats that counts tokens in ``usage``.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from triforce_tree.bench.results import Record
from triforce_tree.bench.tables import Table

if TYPE_CHECKING:
    from aiohttp import ClientSession

# Characters of the sample by which the length of tokens is measured, in this many pieces.
_SAMPLE, _PIECES = 8192, 4
# Seconds between checks whether the user wants to stop, and for a connection.
_LOOK, _CONNECT = 0.2, 30.0
_SHARES = (50, 90, 99)
# Sends one prompt, and waits for the end of its reply.
_Send = Callable[[str], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Endpoint:
    """A server with OpenAI's API.

    Attributes:
        url: its address, up to and including ``/v1``.
        model: the name of the model in requests.
        key: the API key; None for none.
        chat: send chats instead of completions.
        fields: further fields of each request, such as ``ignore_eos``.
    """

    url: str
    model: str
    key: str | None = None
    chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    def session(self) -> "AbstractAsyncContextManager[ClientSession]":
        """Returns an HTTP client with any number of connections, and without a limit of time."""
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT),
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
        )

    def body(self, prompt: str, new_tokens: int) -> Record:
        """Returns the fields of a streamed request."""
        text = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return {
            "model": self.model, **text, "max_tokens": new_tokens, "stream": True,
            "stream_options": {"include_usage": True}, **self.fields,
        }  # fmt: skip

    @property
    def route(self) -> str:
        return f"{self.url.rstrip('/')}/{'chat/completions' if self.chat else 'completions'}"


@dataclass(frozen=True)
class Load:
    """When requests are sent, and how many.

    Attributes:
        prompt_tokens: about how many tokens a prompt has.
        new_tokens: the most new tokens of a request.
        requests: how many requests are sent.
        clients: so many clients send a request each, and the next one when it is answered; None for ``rate``.
        rate: requests per second, which arrive by a Poisson process whatever the server does.
        pause: mean seconds that a client waits before each request, exponentially distributed.
        seconds: requests that have not ended by then are cut; None for no limit.
        seed: of the prompts and of all times.
    """

    prompt_tokens: int
    new_tokens: int
    requests: int
    clients: int | None = None
    rate: float | None = None
    pause: float = 0.0
    seconds: float | None = None
    seed: int = 0


@dataclass
class Sent:
    """A request, and what came back. Times are seconds since the load began.

    Attributes:
        pieces: the time and the characters of each piece of text.
        prompt_tokens, new_tokens, accepted: as the server counted them; ``accepted`` are draft tokens, None
            where the server does not count them.
        error: why it failed; None otherwise.
        cut: whether it was cut at the end of the load.
    """

    begun: float
    pieces: list[tuple[float, int]] = field(default_factory=list)
    ended: float | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    accepted: int | None = None
    error: str | None = None
    cut: bool = False

    @property
    def complete(self) -> bool:
        return self.ended is not None and not self.cut and self.error is None

    def as_row(self) -> Record:
        """Returns the request for a results file, with ``first``, the time of the first piece of text."""
        values = {name: value for name, value in asdict(self).items() if name != "pieces"}
        first = self.pieces[0][0] if self.pieces else None
        return {name: _rounded(value) for name, value in {**values, "first": first}.items()}


def prompts(text: str, count: int, characters: int, seed: str) -> Iterator[str]:
    """Yields prompts of a real text, each from a random place on, and with a beginning of its own.

    Servers that keep the beginnings of earlier prompts find none of them again. A text that is too short is
    repeated.
    """
    draws = random.Random(f"prompts {seed}")
    repeated = text * (2 + characters // len(text))
    for number in range(count):
        name = f"{draws.getrandbits(48):012x}, number {number + 1}\n\n"
        start = draws.randrange(len(text))
        yield (name + repeated[start : start + characters])[:characters]


async def characters_per_token(endpoint: Endpoint, text: str) -> float:
    """Returns how many characters of the text a token of the endpoint's model has.

    Raises:
        ValueError: the endpoint does not answer, or counts no tokens; the message says how it answered.
    """
    step = max(1, len(text) // _PIECES)
    sample = "".join(text[at : at + _SAMPLE // _PIECES] for at in range(0, len(text), step))
    sent = Sent(0.0)
    async with endpoint.session() as session:
        await _ask(session, endpoint, sample, 1, sent, lambda: 0.0)
    if sent.error is not None:
        raise ValueError(f"{endpoint.route}: {sent.error}")
    if not sent.prompt_tokens:
        raise ValueError(f"{endpoint.route} counts no tokens of a prompt in usage, so prompts cannot be cut")
    return len(sample) / sent.prompt_tokens


async def model_of(url: str, key: str | None) -> str:
    """Returns the first model of an endpoint.

    Raises:
        ValueError: the endpoint does not answer, or names none.
    """
    import aiohttp

    route = f"{url.rstrip('/')}/models"
    try:
        async with Endpoint(url, "", key).session() as session, session.get(route) as response:
            status, text = response.status, await response.text()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ValueError(
            f"{route} does not answer ({_short(error)}); start the server, or give another --url"
        ) from error
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        remedies = {401: "set OPENAI_API_KEY to the server's key", 404: "give --url up to /v1"}
        remedy = remedies.get(status, "give --model")
        raise ValueError(f"{route} names no model (status {status}: {_short(text)}); {remedy}") from error


async def send(
    endpoint: Endpoint,
    given: Iterator[str],
    load: Load,
    ended: Callable[[Sent], None] = lambda sent: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Sent]:
    """Sends the requests of a load, and returns them.

    Args:
        given: ``load.requests`` prompts.
        ended: called with each request that has ended or was cut.
        stop: returns whether to cut all requests now.
    """
    sent: list[Sent] = []
    draws = random.Random(f"times {load.seed}")
    start = time.monotonic()

    def clock() -> float:
        return time.monotonic() - start

    async with endpoint.session() as session:

        async def one(prompt: str) -> None:
            request = Sent(clock())
            sent.append(request)
            try:
                await _ask(session, endpoint, prompt, load.new_tokens, request, clock)
            except asyncio.CancelledError:
                request.cut, request.ended = True, clock()
                raise
            finally:
                ended(request)

        arrivals = _by_rate if load.rate else _by_clients
        work = asyncio.create_task(arrivals(one, given, load, draws))
        while not work.done():
            await asyncio.wait([work], timeout=_LOOK)
            if stop() or (load.seconds is not None and clock() >= load.seconds):
                work.cancel()
        if not work.cancelled():
            work.result()
    return sent


async def _by_rate(one: _Send, given: Iterator[str], load: Load, draws: random.Random) -> None:
    assert load.rate is not None
    async with asyncio.TaskGroup() as running:
        for prompt in given:
            await asyncio.sleep(draws.expovariate(load.rate))
            running.create_task(one(prompt))


async def _by_clients(one: _Send, given: Iterator[str], load: Load, draws: random.Random) -> None:
    async def client() -> None:
        for prompt in given:
            if load.pause:
                await asyncio.sleep(draws.expovariate(1 / load.pause))
            await one(prompt)

    async with asyncio.TaskGroup() as running:
        for _ in range(load.clients or 1):
            running.create_task(client())


async def _ask(
    session: "ClientSession",
    endpoint: Endpoint,
    prompt: str,
    new_tokens: int,
    sent: Sent,
    clock: Callable[[], float],
) -> None:
    """Sends one request, and notes what comes back in ``sent``."""
    import aiohttp

    try:
        async with session.post(endpoint.route, json=endpoint.body(prompt, new_tokens)) as response:
            if response.status != 200:
                sent.error = f"status {response.status}: {_short(await response.text())}"
            else:
                async for line in response.content:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        _note(json.loads(line[5:]), sent, clock())
                if sent.error is None and sent.new_tokens is None:
                    sent.error = "the stream ended without usage"
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
        sent.error = f"{type(error).__name__}: {_short(error)}"
    sent.ended = clock()


def _note(chunk: Record, sent: Sent, now: float) -> None:
    """Notes one chunk of a stream."""
    if "error" in chunk:
        sent.error = _short(chunk["error"])
        return
    characters = 0
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice
        texts = (delta.get(name) for name in ("content", "reasoning_content", "reasoning", "text"))
        characters += sum(len(text) for text in texts if text)
    if characters:
        sent.pieces.append((now, characters))
    if usage := chunk.get("usage"):
        sent.prompt_tokens, sent.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage.get("completion_tokens_details") or {}
        sent.accepted = details.get("accepted_prediction_tokens")


def summary(sent: Sequence[Sent]) -> Record:
    """Returns the figures of a load.

    ``first_token_seconds``, ``token_seconds`` and ``gap_seconds`` have percentiles. The first is from the
    sending of a request to its first text, the second the mean time of a further token in a complete request,
    and the third the time between two pieces of text of one request. Tokens of requests that were cut are
    estimated from their characters.
    """
    complete = [each for each in sent if each.complete]
    characters = sum(size for each in complete for _, size in each.pieces)
    tokens = sum(each.new_tokens or 0 for each in complete)
    per_character = tokens / characters if characters else 0.0
    cut = sum(size for each in sent if each.cut for _, size in each.pieces)
    seconds = max((each.ended for each in sent if each.ended is not None), default=0.0)
    answered = [each for each in sent if each.pieces]
    accepted = [each.accepted for each in complete if each.accepted is not None]
    new = tokens + round(cut * per_character)
    firsts = [each.pieces[0][0] - each.begun for each in answered]
    later = [
        (each.pieces[-1][0] - each.pieces[0][0]) / (each.new_tokens - 1)
        for each in complete
        if each.pieces and each.new_tokens and each.new_tokens > 1
    ]
    gaps = [
        after - before
        for each in answered
        for (before, _), (after, _) in zip(each.pieces, each.pieces[1:], strict=False)
    ]
    errors: dict[str, int] = {}
    for each in sent:
        if each.error is not None:
            errors[each.error] = errors.get(each.error, 0) + 1
    values = {
        "begun": len(sent), "complete": len(complete), "cut": sum(each.cut for each in sent),
        "failed": sum(errors.values()), "errors": errors, "seconds": seconds,
        "median_prompt": int(np.median([each.prompt_tokens or 0 for each in complete])) if complete else None,
        "tokens": new, "tokens_per_second": new / seconds if seconds else 0.0,
        "requests_per_second": len(complete) / seconds if seconds else 0.0,
        "accepted_share": sum(accepted) / tokens if accepted and tokens else None,
        "first_token_seconds": _percentiles(firsts), "token_seconds": _percentiles(later),
        "gap_seconds": _percentiles(gaps),
    }  # fmt: skip
    return {name: _rounded(value) for name, value in values.items()}


def table(records: Sequence[Record]) -> Table:
    """Returns the table of some records, which are summaries with the values of their :class:`Load`."""
    columns = (
        "load", "prompt", "requests", "failed", "cut", "tokens/s", "first, s: p50", "p90", "p99",
        "token, ms: p50", "p90", "p99", "gap, ms: p99", "accepted",
    )  # fmt: skip
    rows = [
        (
            load_name(r), f"{r['median_prompt'] or r['prompt_tokens']:,}", str(r["begun"]), str(r["failed"]),
            str(r["cut"]), f"{r['tokens_per_second']:,.1f}", *_cells(r["first_token_seconds"], 1, 3),
            *_cells(r["token_seconds"], 1e3, 2), _cells(r["gap_seconds"], 1e3, 1)[-1],
            "" if r["accepted_share"] is None else f"{100 * r['accepted_share']:.0f} %",
        )
        for r in records
    ]  # fmt: skip
    note = (
        "prompt: tokens; first: from the request to its first text; token: mean of a request after its first "
        "text; gap: between two pieces of text; accepted: the share of new tokens that were drafted"
    )
    return Table("requests to a server", columns, rows, note)


def load_name(key: Record) -> str:
    """Returns the clients or the rate of a load in words."""
    if (clients := key["clients"]) is None:
        return f"{key['rate']:g} requests/s"
    return f"{clients} client{'s' if clients > 1 else ''}"


def _cells(values: Record | None, factor: float, digits: int) -> list[str]:
    return ["" if values is None else f"{factor * values[f'p{share}']:.{digits}f}" for share in _SHARES]


def _percentiles(values: Sequence[float]) -> Record | None:
    if not values:
        return None
    found = np.percentile(np.array(values), _SHARES)
    return {f"p{share}": _rounded(float(value)) for share, value in zip(_SHARES, found, strict=True)}


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else text[:200] + " ..."
