"""Long prompts of real text: Python's own help topics, or a data set's documents."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce_tree.loading.model_folder import in_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PYDOC = "pydoc"
# Suffixes of data set files, and the datasets library's names of their formats.
ROWS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def pydoc_text() -> str:
    """Returns CPython's own help topics: half a megabyte of English prose and examples."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def dataset_texts(name: str, split: str = "test", column: str = "text") -> Iterator[str]:
    """Yields the documents of a Hugging Face data set. A record's list of texts (``turns``) is one document.

    Args:
        name: a name on the hub, a folder, or a single file (:data:`ROWS`), for which ``split`` has no effect.
        split, column: the split and the column to read.

    Raises:
        ValueError: the column is missing or has no text, or the file cannot be read.
        FileNotFoundError: the file does not exist.
    """
    for row in dataset_rows(name, split):
        if column not in row:
            raise ValueError(
                f"data set {name!r} has no column {column!r}; its columns: {', '.join(sorted(row))}"
            )
        texts = row[column] if isinstance(row[column], list) else [row[column]]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"column {column!r} of data set {name!r} holds {row[column]!r}, no text; name another"
            )
        yield "\n\n".join(texts)


def dataset_rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Yields the records of a data set; arguments and errors are those of :func:`dataset_texts`."""
    import datasets

    # It would report errors a second time.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    path = Path(name)
    kind = ROWS.get(path.suffix.lower())
    if kind is not None and not path.exists():
        raise FileNotFoundError(f"no such file: {name!r}")
    of_file = {"path": kind, "data_files": {split: str(path)}} if kind and path.is_file() else {"path": name}
    try:
        yield from datasets.load_dataset(**of_file, split=split, streaming=True)
    except Exception as error:  # of any class: the library parses files of others
        # The library asks an empty file for its first row.
        why = "it has no rows" if isinstance(error, StopIteration) else in_one_line(error)
        raise ValueError(
            f"data set {name!r} cannot be read ({why}); give a .jsonl, .json, .csv or "
            ".parquet file, or one on the hub, with a network"
        ) from error


def surrounding(tokenizer: "PreTrainedTokenizerBase", text: str, longest: int, what: str) -> list[int]:
    """Returns the ids of a text from which prompts of up to ``longest`` tokens are cut. A short text is
    repeated.

    Args:
        what: the text that is planted into the prompts.

    Raises:
        ValueError: the text is empty.
    """
    ids = token_ids(tokenizer, text)
    if not ids:
        raise ValueError(f"the text around the {what} is empty; give another")
    return ids * (1 + (2 * longest) // len(ids))


def token_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Returns the ids of a text of any length, without the warning that it exceeds the model."""
    # This is imported here, because the command line reads texts before it imports torch.
    from triforce_tree.requests.chat import encoded

    return encoded(tokenizer, text)


def evenly_spaced(ids: Sequence[int], context: int, count: int) -> list[list[int]]:
    """Returns ``count`` different prompts of ``context`` tokens, evenly spaced in a text.

    Raises:
        ValueError: the text is too short.
    """
    step = (len(ids) - context) // max(1, count - 1)
    if len(ids) < context or (count > 1 and step == 0):
        raise ValueError(
            f"the text has {len(ids)} tokens, too few for {count} different prompts of {context}; "
            "give a longer text, or fewer or shorter prompts"
        )
    return [list(ids[at * step : at * step + context]) for at in range(count)]


def prompts(
    documents: Iterable[str], tokenizer: "PreTrainedTokenizerBase", context: int, count: int
) -> list[list[int]]:
    """Returns ``count`` prompts of ``context`` tokens each: one per document, or evenly spaced in a single
    document.

    Prompts overlap if a single document is shorter than all of them together.

    Raises:
        ValueError: there is not enough text.
    """
    cut: list[list[int]] = []
    longest, documents_seen = 0, 0
    ids: list[int] = []
    for text in documents:
        ids = token_ids(tokenizer, text)
        documents_seen += 1
        longest = max(longest, len(ids))
        if len(ids) >= context:
            cut.append(ids[:context])
        if len(cut) >= count and documents_seen > 1:
            return cut[:count]
    if documents_seen == 1 and longest >= context:
        return evenly_spaced(ids, context, count)
    raise ValueError(
        f"the text holds {len(cut)} prompts of {context} tokens, {count} are wanted (its longest document "
        f"has {longest} tokens); give a longer text or a shorter context"
    )
