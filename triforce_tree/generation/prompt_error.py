"""The refusal of a prompt."""


class PromptError(ValueError):
    """A prompt cannot be continued, for a reason that whoever gave it may read.

    Args:
        sentence: written by this package, or by a chat template, for whoever gave the prompt.
        detail: the text of another library's error, for a user of Python; a server keeps it to its log.
    """

    def __init__(self, sentence: str, detail: str = "") -> None:
        self.sentence = sentence
        super().__init__(f"{sentence}: {detail}" if detail else sentence)


# What code around a tokenizer or a template lets pass: the refusal itself, and what is not about the prompt.
PASSED_ON = (PromptError, ImportError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)
