"""The generated text of a sequence, which ends before a stop string or an end token."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from triforce_tree.text.detokenizer import Detokenizer
from triforce_tree.text.stop_strings import StopMatcher
from triforce_tree.text.vocabulary import Vocabulary


class NewText:
    """Takes new tokens one by one, and returns their text as soon as it is certain.

    Special tokens and end tokens have no text, but a stop string may contain their names.

    Args:
        vocabulary: the vocabulary of the tokenizer.
        prompt: token ids of the prompt.
        end_tokens: token ids that end the sequence.
        stop: strings before which the text ends. Only new text is searched.

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
        """The number of characters so far, including those not returned yet, without incomplete ones."""
        return self._detokenizer.length

    def hidden(self, token: int) -> bool:
        """Returns whether a token has no text."""
        return token in self._ends or self._vocabulary.special(token)

    def put(self, token: int) -> str:
        """Adds a token, and returns the text that is certain now."""
        hidden = self.hidden(token)
        if self._matcher is None:
            return "" if hidden else self._detokenizer.put(token)
        if hidden:
            return self._matcher.put(self._detokenizer.named(token), visible=False)
        return self._matcher.put(self._detokenizer.put(token))

    def end(self) -> str:
        """Returns the rest of the text after the last token."""
        text = self._detokenizer.end()
        return text if self._matcher is None else self._matcher.put(text) + self._matcher.end()

    def spelled(self, token: int) -> tuple[str, bytes | None]:
        """Returns the text and the bytes that a token would add now.

        For part of a character the text is like ``bytes:\\xe4\\xbd``. For a token without text, or whose
        bytes are not known, the result is the token's name and None.
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
    """Returns the text that the tokens ``new`` add to the prompt."""
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    text = NewText(vocabulary, prompt, end_tokens)
    return "".join([*map(text.put, new), text.end()])
