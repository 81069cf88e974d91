"""A text or a conversation that goes on over many calls: only its new tokens are prefilled."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.requests.chat import Message, chat_ids, chats_of
from triforce_tree.requests.inputs import Inputs, prompts_of
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.requests.option_values import checked
from triforce_tree.requests.options import texts_asked
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.requests.tokenized_texts import TokenizedTexts, text_ids
from triforce_tree.runtime.stats import Progress
from triforce_tree.sessions import saved

RESERVE = 4096
"""Tokens after the first prompt that a session takes memory for at once."""

_NOTHING = "there is nothing to continue; give the session a document or a question"


class Session:
    """One sequence that is continued by each call.

    Its keys and values stay in the engine's buffers, which hold the sequence of the last generation. A call
    prefills only what follows the longest prefix that the buffers hold. After a generation of another text on
    the same engine this prefix is short, and nearly the whole session is prefilled again. Two documents that
    take turns therefore need an engine each, ``engine.with_options()`` over the same models (host memory
    holds one offloaded cache at a time), or ``prefix_cache`` with a size. Layers with sliding windows and
    recurrent layers can be continued where a generation ended, and at the ends of the first and of the newest
    prompts, of which copies are kept.

    The text is that of :meth:`Engine.generate` for the whole sequence. In 16 bits two nearly equal logits may
    change their order, because the keys and values of generated tokens were computed by decoding passes.

    Args:
        engine: its models and settings are used.
        document: the beginning of the session: text, token ids of one sequence, or messages.
        reserve: number of tokens after the first prompt for which memory is allocated at once. A longer
            sequence gets larger buffers with as many tokens in reserve. Keys and values are copied to them if
            the device holds both buffers. Otherwise, or if they are offloaded, they are computed again.

    Attributes:
        engine: as given.
        tokens: all token ids so far. A conversation that begins with messages has none before its first call,
            and then those of the last call, because what a chat template writes depends on what follows.
        messages: the conversation so far, answers included; None for a text.
        begun: number of messages before the first call.
        turns: for each call of a conversation, the numbers of tokens and of messages after it.

    Raises:
        ValueError: several sequences were given, text without a tokenizer, or messages without a chat
            template.
    """

    def __init__(self, engine: LoadedEngine, document: Inputs | None = None, reserve: int = RESERVE) -> None:
        checked("reserve", reserve)
        self.engine, self._reserve, self._capacity = engine, reserve, 0
        self.turns: list[tuple[int, int]] = []
        # A copy of the question that ``prompt`` last got, with the messages and token ids that it gave.
        self._coming: tuple[Any, list[Message] | None, list[int]] | None = None
        self._texts = TokenizedTexts(engine.tokenizer) if engine.tokenizer is not None else None
        self.tokens: list[int] = []
        self.messages: list[Message] | None = None
        chats = chats_of(document)
        if chats is not None:
            self.messages = self._one(chats)
        elif document is not None:
            self.tokens = self._ids(document)
        # Messages before the first turn.
        self.begun = len(self.messages or ())

    def generate(self, question: Inputs | None = None, **kwargs: Any) -> GenerateOutput:
        """Appends ``question`` and the model's answer to the session.

        Args:
            question: text or token ids, appended to the tokens as they are, without special tokens; None adds
                nothing. In a conversation a text is a message of the user, and messages are appended to it.
            kwargs: arguments of :meth:`Engine.generate`.

        Returns:
            The output. Its ``sequences`` are the whole session, and its ``reused_tokens`` count the tokens
            that were not prefilled.

        Raises:
            ValueError: :meth:`Engine.generate` raises it, there is nothing to continue, or messages were
                given to a session of text. The session is then unchanged.
        """
        for name in ("inputs", "input_ids", "attention_mask"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(
                    f"{name} is no argument of a session; give the question first, as text or token ids"
                )
        if (count := texts_asked(kwargs)[1]) > 1:
            raise ValueError(
                f"num_return_sequences={count}, but a session goes on with one text; leave it out, or use "
                "engine.tree"
            )
        if self._coming is None or not _equal(self._coming[0], question):
            self.prompt(question)
        assert self._coming is not None
        _, messages, prompt = self._coming
        self._coming = None
        # An array is checked and copied in a tenth of the time that a list of 100,000 tokens takes.
        out = self._continuing(len(prompt)).generate(np.array(prompt, dtype=np.int64), **kwargs)
        self.tokens = out.sequences[0].tolist()
        if messages is not None:
            answer: Any = str(out.text)
            if messages[-1]["role"] == "assistant":
                answer = _continued(messages.pop()["content"], answer)
            self.messages = [*messages, {"role": "assistant", "content": answer}]
            self.turns.append((len(self.tokens), len(self.messages)))
        return out

    def prompt(self, question: Inputs | None = None) -> list[int]:
        """Returns the token ids that :meth:`generate` would continue for this question.

        Raises:
            ValueError: see :meth:`generate`.
        """
        messages, ids = self._asked(question)
        self._coming = (_comparable(question), messages, ids)
        return ids

    def prefill(self, progress: Progress | None = None) -> int:
        """Computes keys and values of all tokens but the last now. Returns how many tokens were in the cache
        before.

        Args:
            progress: called with the number of tokens of each prefilled chunk.

        Raises:
            ValueError: there are no tokens yet, or memory is short.
        """
        with self.program(progress) as (_, reused):
            return reused

    def trim(self, length: int) -> None:
        """Forgets all tokens after the first ``length``, and messages of turns that end after them.

        Raises:
            ValueError: there are fewer tokens.
        """
        if not hasattr(length, "__index__") or not 0 <= length <= len(self.tokens):
            raise ValueError(f"length={length} must lie between 0 and the {len(self.tokens)} tokens so far")
        del self.tokens[length:]
        self._coming = None
        if self.messages is not None:
            self.turns = [turn for turn in self.turns if turn[0] <= length]
            del self.messages[self.turns[-1][1] if self.turns else self.begun :]

    def fork(self) -> "Session":
        """Returns another session with the same tokens, which continues independently.

        Both use the engine's buffers in turn. Their common tokens are kept once. The other tokens of a
        session are prefilled again when it is called after the other one. No memory is copied.
        """
        other = copy.copy(self)
        other._coming = None
        other.tokens, other.turns = list(self.tokens), list(self.turns)
        other.messages = None if self.messages is None else list(self.messages)
        return other

    def save(self, folder: str | Path) -> None:
        """Writes the session into a folder: tokens, messages, keys and values of each layer.

        Keys and values that are not in the buffers any more are computed first. They are copied layer by
        layer, and host memory holds two layers at a time. A session that the folder already has is replaced
        in a single step, after all files of the new one were written, so the disk must hold both for a while.
        If writing fails or the process is killed, the earlier session stays.

        Raises:
            ValueError: there are no tokens yet, several processes share the target, or a message has a value
                that JSON cannot represent.
            OSError: the folder cannot be written, has other files, or another process saves to it.
        """
        self._check_begun()
        saved.save(self, Path(folder))

    @classmethod
    def load(cls, engine: LoadedEngine, folder: str | Path, reserve: int = RESERVE) -> "Session":
        """Returns a session that :meth:`save` wrote, with its keys and values in the engine's buffers.

        Args:
            engine: has the same weights, tokenizer and ``kv_bits``; it may offload or not.
            reserve: see :class:`Session`.

        Raises:
            ValueError: the session was saved with other weights, tokenizer or ``kv_bits``, or a file is
                damaged.
            OSError: a file is missing.
        """
        with saved.opened_for(engine, Path(folder)) as (tokens, files):
            session = cls(engine, tokens, reserve)
            session.messages, session.begun = files.fields["messages"], files.fields["begun"]
            session.turns = [(length, messages) for length, messages in files.fields["turns"]]
            with session.buffers() as program:
                saved.fill(program, session.tokens, files)
        return session

    @contextmanager
    def program(self, progress: Progress | None = None) -> Iterator[tuple[DecodingProgram, int]]:
        """Returns a context with the engine's buffers, which hold the session, and the number of tokens that
        they held before.

        Raises:
            ValueError: there are no tokens yet, or memory is short.
        """
        self._check_begun()
        with self.buffers() as program:
            yield program, program.prefill([self.tokens], progress, "all")[0]

    @contextmanager
    def buffers(self) -> Iterator[DecodingProgram]:
        """Returns a context with the engine's buffers, made for the session's tokens and those in reserve."""
        engine = self._continuing(len(self.tokens))
        with engine.program([self.tokens], max(1, self._capacity - len(self.tokens)), None) as program:
            yield program

    def _check_begun(self) -> None:
        if not self.tokens:
            raise ValueError("the session has no tokens yet; call generate first, or give it a document")

    def _continuing(self, length: int) -> LoadedEngine:
        limit = self.engine.target.max_positions or length + self._reserve
        if length >= self._capacity:
            self._capacity = min(length + self._reserve, limit)
        return self.engine.in_session(self._capacity)

    def _asked(self, question: Inputs | None) -> tuple[list[Message] | None, list[int]]:
        """Returns the messages of a conversation (or None) and the token ids that the next call continues."""
        chats = chats_of(question)
        begins = self.messages is None and chats is not None and not self.tokens
        before: list[Message] | None = [] if begins else self.messages
        if before is None:
            if chats is not None:
                raise ValueError(
                    "this session continues a text, and the question is a list of messages; give text, or "
                    "begin the session with messages"
                )
            prompt = [*self.tokens, *(self._ids(question) if question is not None else [])]
            if not prompt:
                raise ValueError(_NOTHING)
            return None, prompt
        new: list[Message] = []
        if chats is not None:
            new = self._one(chats)
        elif isinstance(question, str):
            new = [{"role": "user", "content": question}]
        elif question is not None:
            raise ValueError("this session is a conversation; give text, or messages")
        messages = [*before, *new]
        if not messages:
            raise ValueError(_NOTHING)
        if self._texts is None:
            raise ValueError("messages need a tokenizer: load(..., tokenizer=...)")
        _check_continued(messages[-1])
        return messages, chat_ids(self._texts, messages)

    def _ids(self, given: Inputs) -> list[int]:
        """Returns the token ids of one sequence. Special tokens are added only to the first text."""
        if isinstance(given, str) and self.tokens:
            if self.engine.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer: load(..., tokenizer=...)")
            given = text_ids(self.engine.tokenizer, given, add_special_tokens=False)
            if not given:
                return []
        prompts = prompts_of(self.engine.target, self.engine.tokenizer, given).tokens
        if len(prompts) > 1:
            raise ValueError(f"a session is one sequence, not {len(prompts)}; open one for each")
        return prompts[0]

    def _one(self, chats: list[Any]) -> list[Message]:
        if len(chats) > 1:
            raise ValueError(f"a session is one conversation, not {len(chats)}; open one for each")
        return list(chats[0])


def _comparable(question: Inputs | None) -> Any:
    """Returns the form in which a question is compared with later ones. Token ids, which are read again, get
    a unique object.
    """
    if question is None or isinstance(question, str):
        return question
    return object() if chats_of(question) is None else copy.deepcopy(question)


def _equal(earlier: Any, question: Inputs | None) -> bool:
    """Returns whether a question equals the earlier one, of which ``earlier`` is a copy."""
    return type(earlier) is type(question) and bool(earlier == question)


def _check_continued(message: Message) -> None:
    """Raises ValueError if the last message is the assistant's and has no text that could be continued."""
    content = message.get("content")
    # If the content has several parts, the model continues the last one.
    text = content[-1].get("text") if content and not isinstance(content, str) else content
    if message["role"] == "assistant" and not isinstance(text, str):
        raise ValueError(
            "the last message is the assistant's, and has no text that the model could continue; give it "
            "content, or leave it out"
        )


def _continued(content: Any, text: str) -> Any:
    """Returns the content of a message (or its parts) with the model's continuation appended."""
    if isinstance(content, str):
        return f"{content}{text}"
    *before, last = content
    return [*before, {**last, "text": f"{last['text']}{text}"}]
