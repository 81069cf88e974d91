"""The new text of a sequence: it goes on from the prompt's, and ends before a stop string or an end token."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from triforce_tree.text.detokenizer import Detokenizer
from triforce_tree.text.stop_strings import StopMatcher
from triforce_tree.text.vocabulary import Vocabulary


class NewText:
    """Takes new tokens one by one, and gives their text as soon as it is certain to be part of the whole.

    Special tokens and end tokens have no text, but are looked for in stop strings by their names.

    Args:
        vocabulary: of the tokenizer.
        prompt: token ids that the text goes on from.
        end_tokens: ids that end the sequence.
        stop: strings before which the text ends. They are looked for in new text alone.

    Attributes:
        stopped: whether a stop string was found.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        end_tokens: Collection[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        self._vocabulary, self._ends = vocabulary, end_tokens
        self._detokenizer = Detokenizer(vocabulary, prompt)
        self._matcher = StopMatcher(stop) if stop else None

    @property
    def stopped(self) -> bool:
        return self._matcher is not None and self._matcher.found

    @property
    def length(self) -> int:
        """Characters so far, those that are held back included, without parts of characters."""
        return self._detokenizer.length

    def hidden(self, token: int) -> bool:
        """Whether a token has no text."""
        return token in self._ends or self._vocabulary.special(token)

    def put(self, token: int) -> str:
        """The text that is certain after another token."""
        hidden = self.hidden(token)
        if self._matcher is None:
            return "" if hidden else self._detokenizer.put(token)
        if hidden:
            return self._matcher.put(self._detokenizer.named(token), visible=False)
        return self._matcher.put(self._detokenizer.put(token))

    def end(self) -> str:
        """What is left when no more tokens come."""
        text = self._detokenizer.end()
        return text if self._matcher is None else self._matcher.put(text) + self._matcher.end()

    def spelled(self, token: int) -> tuple[str, bytes | None]:
        """The text and the bytes that a token would add now.

        A part of a character is spelled ``bytes:\\xe4\\xbd``; a token without text has a name, and no bytes.
        """
        if self.hidden(token):
            return self._vocabulary.name(token), None
        added = self._detokenizer.added(token)
        if added is None:
            return self._vocabulary.name(token), None
        try:
            return added.decode(), added
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in added), added


def new_text(
    tokenizer: PreTrainedTokenizerBase | Vocabulary,
    prompt: Sequence[int],
    new: Sequence[int],
    end_tokens: Collection[int] = (),
) -> str:
    """The whole text of new tokens behind a prompt: all pieces of :class:`NewText`."""
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    text = NewText(vocabulary, prompt, end_tokens)
    return "".join([*map(text.put, new), text.end()])
