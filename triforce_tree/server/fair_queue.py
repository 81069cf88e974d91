"""The texts that wait in a server, in an order that is fair to its clients.

Each client has a counter of the tokens that were decoded for it, and a text of the client with the lowest
counter comes next (Sheng et al., "Fairness in serving large language models", arXiv 2401.00588). A client
that was idle begins with the lowest counter of the others, so that it gains nothing by waiting.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from triforce_tree.server.text_stream import ServedText

NEW_TOKEN = 2
"""Prompt tokens that a new token counts as."""


class FairQueue:
    """Holds texts that wait, and the counters of the clients with texts that wait or run."""

    def __init__(self) -> None:
        self._texts: dict[str, dict[ServedText, None]] = {}
        self._running: Counter[str] = Counter()
        self._charged: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._texts.values()))

    def __iter__(self) -> Iterator[ServedText]:
        """Yields the texts in the order in which they would begin one after another."""
        left = {client: iter(list(texts)) for client, texts in self._texts.items()}
        charged = {client: self._charged[client] for client in left}
        while left:
            client = min(left, key=charged.__getitem__)
            if (text := next(left[client], None)) is None:
                del left[client]
            else:
                charged[client] += len(text.prompt)
                yield text

    def extend(self, texts: Iterable[ServedText]) -> None:
        """Adds texts behind those of the same client."""
        for text in texts:
            client = text.client
            least = min((self._charged[each] for each in self._active), default=0.0)
            if client not in self._active:
                self._charged[client] = max(least, self._charged.get(client, 0.0))
            self._texts.setdefault(client, {})[text] = None

    def begin(self, text: ServedText) -> None:
        """Removes a text that begins, and charges its prompt."""
        self._drop(text)
        self._running[text.client] += 1
        self._charged[text.client] += len(text.prompt)

    def decoded(self, text: ServedText, tokens: int) -> None:
        """Charges new tokens of a text that runs."""
        self._charged[text.client] += NEW_TOKEN * tokens

    def ended(self, text: ServedText) -> None:
        """Records that a text that ran has ended."""
        self._running[text.client] -= 1
        self._running += Counter()
        self._forget()

    def put_back(self, text: ServedText) -> None:
        """Lets a text that ran wait again, before the others of its client."""
        client = text.client
        self._texts[client] = {text: None, **self._texts.get(client, {})}
        self._running[client] -= 1
        self._running += Counter()

    def remove(self, text: ServedText) -> None:
        """Removes a text that nobody waits for any more."""
        self._drop(text)
        self._forget()

    def _drop(self, text: ServedText) -> None:
        client = text.client
        del self._texts[client][text]
        if not self._texts[client]:
            del self._texts[client]

    @property
    def _active(self) -> set[str]:
        return self._texts.keys() | self._running.keys()

    def _forget(self) -> None:
        """Forgets the counters of idle clients that are not above those of the others."""
        active = self._active
        least = min((self._charged[client] for client in active), default=float("inf"))
        for client in self._charged.keys() - active:
            if self._charged[client] <= least:
                del self._charged[client]
