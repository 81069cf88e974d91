"""Prompts of public data sets: a template around a text, which loses its middle where it is too long."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from triforce_tree.eval.public.catalogue import Task
from triforce_tree.eval.public.rows import Example
from triforce_tree.eval.text import token_ids
from triforce_tree.runtime.files.json_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = "{context}"


def template_of(path: str | None, task: str, own: Task) -> str:
    """The prompt of a task: from a JSON file of templates by task (``""`` for the only one), else our own.

    Raises:
        ValueError: the file has none for this task, or it lacks ``{context}``.
        OSError: it cannot be read.
    """
    if path is None:
        return own.prompt
    try:
        templates = read_json(Path(path))
        template = templates[task]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path!r} has no template for task {task!r}; give a JSON object of templates by task, with "
            "{context} and {input}"
        ) from error
    if not isinstance(template, str) or template.count(_CONTEXT) != 1:
        raise ValueError(f"the template of task {task!r} in {path!r} needs {_CONTEXT} once; add it")
    return template


class Prompts:
    """Prompts of at most so many tokens.

    Args:
        tokenizer: of the model under test.
        template: with ``{context}`` once; ``{input}`` and ``{options}`` where they are wanted.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._ids: dict[str, list[int]] = {}

    def prompt(self, example: Example, most: int) -> list[int]:
        """Token ids: those of the whole prompt, or with the middle of its text left out (as LongBench does).

        Raises:
            ValueError: ``most`` is too small for what surrounds the text.
        """
        ids = self._of_example(example)
        if len(ids) <= most:
            return list(ids)
        head, _, tail = self._filled(example)
        # The template's own tokens are never left out.
        before = len(token_ids(self._tokenizer, head)) if head else 1
        after = len(token_ids(self._tokenizer, tail))
        room = most - before - after
        if room < 1:
            raise ValueError(
                f"a prompt of {most} tokens has no place for the text between instructions of "
                f"{before + after}; use longer --lengths"
            )
        start = before + room // 2
        return [*ids[:start], *ids[len(ids) - (most - start) :]]

    def _of_example(self, example: Example) -> list[int]:
        whole = "".join(self._filled(example))
        if whole not in self._ids:
            # Only the newest is kept: texts are long, and every length asks for the same one.
            self._ids = {whole: token_ids(self._tokenizer, whole)}
        return self._ids[whole]

    def _filled(self, example: Example) -> tuple[str, str, str]:
        head, _, tail = self._template.partition(_CONTEXT)
        options = example.expected.options if example.expected is not None else []
        listed = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", options, strict=False))
        return _put(head, example, listed), example.context, _put(tail, example, listed)


def _put(part: str, example: Example, options: str) -> str:
    return part.replace("{options}", options).replace("{input}", example.question)


def beginnings(
    examples: Sequence[Example], tokenizer: "PreTrainedTokenizerBase", length: int
) -> list[list[int]]:
    """The first ``length`` tokens of texts without questions.

    Raises:
        ValueError: a text is shorter.
    """
    cut = []
    for number, example in enumerate(examples):
        # No tokenizer's tokens have more characters than this on average; encoding a whole book takes long.
        ids = token_ids(tokenizer, example.context[: 16 * length])
        if len(ids) < length:
            raise ValueError(
                f"text {number} of the data has {len(ids):,} tokens, fewer than the {length:,} of --lengths; "
                "use shorter ones or longer texts"
            )
        cut.append(ids[:length])
    return cut
