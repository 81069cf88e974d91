"""The error for a prompt that cannot be used."""


class PromptError(ValueError):
    """A prompt cannot be continued. The reason may be shown to the person who sent the prompt.

    Args:
        sentence: the reason, written by this package or by a chat template.
        detail: the text of another library's error. Python users see it; a server writes it only to its log.
    """

    def __init__(self, sentence: str, detail: str = "") -> None:
        self.sentence = sentence
        super().__init__(f"{sentence}: {detail}" if detail else sentence)


# What code around a tokenizer or a template lets pass: the refusal itself, and what is not about the prompt.
PASSED_ON = (PromptError, ImportError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)
