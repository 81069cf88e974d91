"""The engine: a target, its drafter and their settings, with the method ``generate``."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex, Unpack

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from triforce_tree.branching.several import several_texts
from triforce_tree.branching.tree import TextTree
from triforce_tree.config import HierarchyConfig, Options, flat_options
from triforce_tree.decoding.explain.explanation import Explanation, explained
from triforce_tree.decoding.hierarchy import Hierarchy, PlannedPrograms
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.plain_passes import PlainPasses
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.grammar.matching import Grammars
from triforce_tree.grammar.values import Grammar, grammars_of
from triforce_tree.kv.cached_tokens import Reuse, reuse_of
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.loading.drafter_choice import check_drafter_options
from triforce_tree.loading.load_guard import GuardReport
from triforce_tree.loading.vocabularies import token_map
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.requests.batch import Batch
from triforce_tree.requests.batch_pool import BatchPool
from triforce_tree.requests.in_step import check_in_step, decode_in_step
from triforce_tree.requests.inputs import Ids, Inputs, prompt_of
from triforce_tree.requests.joining import Joining
from triforce_tree.requests.kept_state import why_in_step
from triforce_tree.requests.notices import Notices, cost_of_processors
from triforce_tree.requests.option_values import checked
from triforce_tree.requests.options import texts_asked
from triforce_tree.requests.output import GenerateOutput, joined
from triforce_tree.requests.request import (
    Arguments,
    Request,
    RunOptions,
    logprobs_of,
    seeds_of,
    speculation_of,
)
from triforce_tree.requests.streamers import Streamers
from triforce_tree.runtime import distributed
from triforce_tree.runtime.stats import Progress
from triforce_tree.runtime.token_ids import listed_ids
from triforce_tree.sessions.session import RESERVE, Session
from triforce_tree.verify.sampling import ProbsFromLogits


class Engine:
    """A target, its drafter and their settings, ready to generate. It is made by :func:`load`.

    Args:
        target: a transformers causal LM.
        draft: a smaller causal LM, or any :class:`~triforce_tree.drafters.base.Drafter`; None for suffix
            matching.
        tokenizer: needed for text prompts and ``stop_strings``.
        config: settings of all levels.
        given: names of options that the user set. They are not replaced by defaults of the device.
        streamed: the weights of the target's layers, if they are kept in host memory.
        draft_tokenizer: the draft model's tokenizer, which is compared with the target's; None if it is not
            known.

    Raises:
        ValueError: the models cannot work together, or ``offload_weights=True`` was given without
            ``streamed``.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: HierarchyConfig | None = None,
        given: Collection[str] = (),
        streamed: StreamedWeights | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._given = frozenset(given)
        self._notices = Notices()
        self._config = config or HierarchyConfig()
        # Which tokens are kept in the buffers between calls, and for how many tokens the buffers are made.
        self._reuse: Reuse = reuse_of(self._config)
        self._capacity = 0
        if self._config.offload_weights is True and streamed is None:
            raise ValueError(
                "offload_weights=True takes effect when weights are loaded; use triforce_tree.load"
            )
        level_0 = HFModel(draft) if isinstance(draft, PreTrainedModel) else draft
        level_2, tokens = HFModel(target, streamed), None
        if isinstance(level_0, HFModel):
            tokens = token_map(level_2.vocab_size, level_0.vocab_size, tokenizer, draft_tokenizer)
        self._hierarchy = Hierarchy(level_2, level_0, self._config, tokens)
        self._grammars = Grammars(tokenizer, level_2.vocab_size)

    def __copy__(self) -> "Engine":
        """Returns an engine with the same models and buffers, for :meth:`with_options` and the like."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "an Engine holds buffers and captured graphs and can be neither pickled nor deep-copied; call "
            "triforce_tree.load in the other process, or share the engine between threads"
        )

    def generate(
        self,
        inputs: Inputs | None = None,
        *,
        input_ids: Ids | None = None,
        attention_mask: Ids | None = None,
        generation_config: GenerationConfig | dict[str, Any] | None = None,
        logits_processor: LogitsProcessorList | LogitsProcessor | list[LogitsProcessor] | None = None,
        stopping_criteria: StoppingCriteriaList | StoppingCriteria | list[StoppingCriteria] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        stop_strings: str | list[str] | None = None,
        streamer: BaseStreamer | Sequence[BaseStreamer] | None = None,
        seed: int | Sequence[int | None] | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        speculation: str | Mapping[str, int] | None = None,
        logprobs: bool | Sequence[bool | None] = False,
        progress: Progress | None = None,
        pinned: Callable[[int], None] | None = None,
        max_batch: int | None = None,
        joining: Joining | None = None,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Continues a prompt, by exactly the target's own distribution.

        Threads may call engines over the same models at the same time; their generations wait for each
        other. The models themselves are not changed: transformers' own generate may run at the same time.

        Args:
            inputs: text, token ids ``[L]`` or ``[B, L]`` (tensor, array, list; rows of a list may differ in
                length), a list of texts, what a tokenizer returns, or a list of messages (dicts with role and
                content; a last one of the assistant is continued) or of such lists, by the tokenizer's chat
                template. Sequences of a batch run together, as many as memory holds; when one ends, the next
                one begins. They run one by one if a logits processor reads the previous tokens.
            input_ids: token ids under transformers' own keyword, instead of ``inputs``.
            attention_mask: has the shape of the ids; tokens with mask 0 are padding, on either side, and are
                left out.
            generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, stop_strings: as
                in transformers; ``stop_strings`` needs a tokenizer. Nothing is drafted if they may keep state
                (``requests/kept_state.py``).
            streamer: as in transformers, or one for each sequence; see :class:`Streamers`.
            seed: the seed of all draws, from which each sequence derives its own
                (``verify.draws.sequence_seed``); by default it is drawn from torch's global generator. A list
                has the seed of each sequence, or None: its text then depends on its seed, prompt and options
                alone, and not on the drafter or on what is decoded beside it, but fewer drafted tokens are
                accepted (``verify/seeded.py``).
            grammar: what the new text of every prompt must be (``triforce_tree.grammar``: ``JSONSchema``,
                ``JSONObject``, ``Regex``, ``EBNF``, ``Choice``), or a list with one or None for each prompt.
                Tokens that the grammar does not allow get probability 0; the end of the text is allowed
                where the grammar may end. Needs xgrammar.
            speculation: "off" drafts nothing; {"levels": 2, "length": 8} allows passes of at most so many
                levels that verify at most so many draft tokens on a path. The distribution is the same.
            logprobs: return the log-probability of each new token, see :class:`GenerateOutput`; or a list for
                the prompts.
            progress: called with the number of prompt tokens that were kept, then with the number of tokens
                of each prefilled chunk.
            pinned: called while an offloaded cache allocates host memory, with the number of bytes.
            max_batch: the most sequences that are decoded together; by default as many as memory holds.
            joining: the source of further prompts while the batch runs.
            kwargs: options of ``GenerationConfig``: max_new_tokens, temperature, top_k, top_p, do_sample,
                num_beams, num_return_sequences, output_scores, ...; one that is not supported raises.
                ``frequency_penalty`` and ``presence_penalty`` are those of OpenAI's API. Those of
                ``requests.options.PER_PROMPT``, such as temperature or max_new_tokens, may be a list with a
                value for each prompt, or None.

        Raises:
            ValueError: a prompt is empty or too long, an option is not supported, or logits are NaN.
            RuntimeError: the call comes from a callback of a generation with the same models.
        """
        given = {
            "input_ids": input_ids, "attention_mask": attention_mask, "generation_config": generation_config,
            "logits_processor": logits_processor, "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn, "stop_strings": stop_strings, **kwargs,
        }  # fmt: skip
        beams, texts = texts_asked(given)
        if beams > 1 or texts > 1:
            own: dict[str, Any] = {
                "inputs": inputs, "streamer": streamer, "seed": seed, "grammar": grammar,
                "logprobs": logprobs, "progress": progress, "pinned": pinned, "max_batch": max_batch,
                "joining": joining, "speculation": speculation,
            }  # fmt: skip
            return several_texts(self, beams, texts, {**given, **own})
        target = self._hierarchy.target
        target.check_sizes()
        arguments = Arguments.read(target, self.tokenizer, inputs, given)
        count = len(arguments.prompts.tokens)
        common_seed, seeds = seeds_of(seed, count)
        how = RunOptions(
            streamers=Streamers(streamer, count), progress=progress, seed=common_seed, seeds=seeds,
            pinned=pinned, logprobs=logprobs_of(logprobs, count), max_batch=checked("max_batch", max_batch),
            joining=joining, grammar=grammars_of(grammar, count), grammars=self._grammars,
            speculation=speculation_of(speculation),
        )  # fmt: skip
        out = self.decode(arguments.prepared(target, how))
        if out is not None:
            return out
        # One by one: transformers prepares processors for each sequence alone.
        outputs = []
        for number in range(count):
            out = self.decode(arguments.prepared(target, how.alone(number), number))
            assert out is not None, "a single sequence is decoded"
            if joining is not None:
                joining.ended(number, out)
            outputs.append(out)
        return joined(outputs, arguments.prompts.ids, arguments.pad_token)

    def compile(self, grammar: Grammar) -> None:
        """Compiles a grammar, so that ``generate`` finds it compiled. This may take seconds.

        Raises:
            ImportError: xgrammar is not installed.
            ValueError: there is no tokenizer or no token that ends a text, or the grammar cannot be compiled.
        """
        grammars_of(grammar, 1)
        ends = self.target.settings.eos_token_id
        self._grammars.compile(grammar, None if ends is None else listed_ids(ends))

    def session(self, document: Inputs | None = None, *, reserve: int = RESERVE) -> Session:
        """Returns a session: a text or a conversation of which each call prefills only the new tokens; see
        :class:`Session`.
        """
        return Session(self, document, reserve)

    def load_session(self, folder: str | Path, *, reserve: int = RESERVE) -> Session:
        """Returns a session that :meth:`Session.save` wrote; see :meth:`Session.load`."""
        return Session.load(self, Path(folder), reserve)

    def tree(
        self, prompt: Inputs, *, max_bytes: int | None = None, progress: Progress | None = None
    ) -> TextTree:
        """Returns a tree of texts whose prompt is prefilled now; see :class:`TextTree`."""
        return TextTree(self, prompt, max_bytes, progress)

    def explain(
        self,
        inputs: Inputs,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Explanation:
        """Continues one prompt, and returns which passes were chosen and why.

        Args:
            progress: called with numbers of prompt tokens as they are prefilled.

        Raises:
            ValueError: a prompt, a temperature or a number of tokens is wrong.
        """
        checked("max_new_tokens", max_new_tokens)
        to_probs = ProbsFromLogits.at(checked("temperature", temperature))
        prompt = prompt_of(self.target, self.tokenizer, inputs)
        with self.program([prompt], max_new_tokens, to_probs) as program:
            return explained(program, to_probs, prompt, max_new_tokens, seed, self.tokenizer, progress)

    def with_options(self, **options: Unpack[Options]) -> "Engine":
        """Returns an engine over the same models with other options of :func:`load`.

        Raises:
            ValueError: the options are impossible; ``offload_weights`` differs; or ``tree`` was given
                although the drafter does not take it.
        """
        given = flat_options(options)
        check_drafter_options(self._hierarchy.own_drafter, self._hierarchy.draft, given)
        asked, weights = given.get("offload_weights"), self._config.offload_weights
        if asked not in (None, weights):
            raise ValueError(
                f"offload_weights={asked!r} differs from {weights!r}, with which the weights were placed; "
                "load the models anew"
            )
        other = copy.copy(self)
        other._given, other._config = self._given | frozenset(given), self._config.changed(given)
        if not self._capacity:
            other._reuse = reuse_of(other._config)
        other._hierarchy = self._hierarchy.with_config(other._config)
        return other

    @property
    def target(self) -> HFModel:
        """Returns the target model, which levels 1 and 2 run."""
        return self._hierarchy.target

    @property
    def draft(self) -> HFModel | None:
        """Returns the draft model, or None for any other drafter."""
        return self._hierarchy.draft

    @property
    def token_map(self) -> TokenMap | None:
        """Returns the map from the draft model's token ids to the target's, or None if they are the same."""
        return self._hierarchy.tokens

    @property
    def guard(self) -> GuardReport:
        """Returns the report of the comparison of our forwards with transformers' own forward of the
        target.
        """
        return self._hierarchy.guard

    @property
    def config(self) -> HierarchyConfig:
        """Returns the settings of the last generation; before the first generation, the settings that were
        given.
        """
        return self._hierarchy.config

    @property
    def memory(self) -> MemoryPlan | None:
        """Returns the memory plan of the last generation, or None if nothing may be offloaded."""
        return self._hierarchy.memory

    @property
    def offloads(self) -> bool:
        """Returns whether the last generation kept its KV slots in host memory."""
        return self._hierarchy.offloads

    @property
    def last_program(self) -> DecodingProgram | None:
        """Returns the buffers and stages of the last generation, as long as they are kept."""
        return self._hierarchy.last_program

    def levels(self, prompt_tokens: int) -> int:
        """Returns the most levels of a text of this many tokens."""
        return self._hierarchy.levels(prompt_tokens)

    def memory_plan(self, prompt_tokens: int, new_tokens: int) -> MemoryPlan | None:
        """Returns the memory plan of a generation of such a prompt, or None unless KV slots may be offloaded.

        Raises:
            ValueError: memory is too small, the model's data cannot be offloaded as needed, or a number of
                tokens is less than 1.
        """
        if prompt_tokens < 1 or new_tokens < 1:
            raise ValueError(f"prompt_tokens={prompt_tokens} and new_tokens={new_tokens} must be at least 1")
        with self._hierarchy.generation():
            self._hierarchy.use(self._config)
            return self._hierarchy.plan_memory([prompt_tokens], new_tokens, self._given)

    def release(self) -> None:
        """Frees the buffers of the last generation. The next generation makes new ones."""
        self._hierarchy.release()

    def close(self) -> None:
        """Frees the last generation's buffers and the weights in host memory. If there were such weights,
        later calls raise RuntimeError; otherwise they make new buffers.
        """
        self._hierarchy.close()

    def generation(self) -> AbstractContextManager[None]:
        """Returns a context in which only this thread computes with these models, as they are now."""
        return self._hierarchy.generation()

    def in_session(self, tokens: int) -> "Engine":
        """Returns an engine over the same buffers, which are made for ``tokens`` tokens and keep their
        contents.
        """
        other = copy.copy(self)
        other._reuse, other._capacity = "all", min(tokens, self.target.max_positions or tokens)
        return other

    @contextmanager
    def program(
        self, prompts: list[list[int]], new_tokens: int, to_probs: ProbsFromLogits | None
    ) -> Iterator[DecodingProgram]:
        """Returns a context with the buffers and stages that :meth:`generate` would use for these prompts.

        Args:
            to_probs: maps logits to distributions, for the stages; None if only forwards are run.

        Raises:
            ValueError: a prompt is too long, or memory is too small.
        """
        for prompt in prompts:
            self.target.check_length(len(prompt), new_tokens)
        with self._hierarchy.generation():
            lengths = [len(prompt) for prompt in prompts]
            self._hierarchy.choose_settings(self._config, self._given, lengths, new_tokens)
            program = self._hierarchy.program(prompts, new_tokens, reuse=self._reuse)
            if to_probs is not None:
                program.prepare(to_probs)
            yield program

    @torch.no_grad()
    def decode(self, request: Request) -> GenerateOutput | None:
        """Decodes the sequences of a request together. Returns None if they must be decoded one by one.

        A single sequence is always decoded.
        """
        hierarchy = self._hierarchy
        with hierarchy.generation():
            distributed.check_equal({"settings": self._config, **request.alike()})
            for sequence in request.sequences:
                hierarchy.target.check_length(len(sequence.prompt), sequence.ending.max_new_tokens)
            why = distributed.broadcast_object(why_in_step(request))
            if why is not None and len(request.parts) > 1:
                return None
            if why is not None:
                out = self._in_step(request, why)
            elif (batch := self._batch(request)) is not None:
                out = batch.decode()
            else:
                return None
            out.memory = hierarchy.memory.as_dict() if hierarchy.memory is not None else None
            out.ranks = distributed.shares(self._config.text_ranks)
        return out

    def _batch(self, request: Request) -> Batch | None:
        """Chooses the settings for a request, and returns the batch that decodes it. None means that its
        sequences must be decoded one by one.
        """
        hierarchy, how, prompts, to_probs = self._hierarchy, request.how, request.prompts, request.to_probs
        most = min(how.max_batch or len(prompts), len(prompts))
        longest = sorted(prompts, key=len)[-most:]
        width = len(longest[-1])
        coming = max(request.new_tokens, self._capacity - width)
        several, joining = len(prompts) > 1, how.joining
        pool = None
        if several or joining is not None:
            # A session has its own slots, and so shares no prefixes.
            shares = self._reuse != "none" and not self._capacity and how.max_batch != 1
            pool = BatchPool(hierarchy, prompts, coming, how.max_batch, joining, shares)
        lengths = [len(prompt) for prompt in longest]
        places = (how.max_batch or most) if joining is not None else None
        hierarchy.choose_settings(self._config, self._given, lengths, coming, pool, places)
        if reading := to_probs.on_host:
            on_gpu = hierarchy.target.device.type == "cuda"
            self._notices.log(cost_of_processors(reading, request.config, len(prompts), on_gpu))
        whole = most < len(prompts) and (hierarchy.offloads or self._config.text_ranks > 1)
        settings = [sequence.to_probs or to_probs for sequence in request.sequences]
        if several and (whole or not hierarchy.together(settings, prompts)):
            return None
        first: Sequence[Sequence[int]] = prompts
        sequences, size = request.sequences, 1
        if pool is not None:
            size = pool.batch_size(most, width, coming)
            order, first = pool.beginning(prompts, size)
            sequences = [request.sequences[n] for n in order]
        seed = distributed.broadcast_object(
            int(torch.randint(2**62, (), device="cpu")) if how.seed is None else how.seed
        )
        least = hierarchy.settled if joining is not None else None
        draws = not all(each.greedy for each in settings)
        loop = DecodingLoop(
            PlannedPrograms(hierarchy, first, width + coming, self._reuse, how.pinned, pool, least),
            [*sequences[:size], *[None] * (size - len(sequences))],
            to_probs, seed, repeatable=how.seed is not None,
            by_position=how.seeds is not None and (joining is not None or draws),
            progress=how.progress, reuse=self._reuse, masked=request.masked, limit=how.speculation,
            in_chunks=joining is not None and pool is not None and pool() is not None,
        )  # fmt: skip
        return Batch(request, loop, self.tokenizer, hierarchy, sequences[size:], pool)

    def _in_step(self, request: Request, why: str) -> GenerateOutput:
        """Decodes by transformers' own loop (``requests/in_step.py``); ``why`` is the reason."""
        hierarchy, prompts = self._hierarchy, request.prompts
        longest = max(map(len, prompts))
        coming = max(request.new_tokens, self._capacity - longest)
        check_in_step(hierarchy.target, request, why)
        lengths = [len(prompt) for prompt in prompts]
        hierarchy.choose_settings(self._config, self._given, lengths, coming)
        self._notices.log(
            "nothing is drafted, so that logits processors and stopping criteria are called as by "
            f"model.generate: {why}"
        )
        programs = PlannedPrograms(hierarchy, prompts, longest + coming, self._reuse, request.how.pinned)
        passes = PlainPasses(programs, prompts, request.how.progress, self._reuse)
        return decode_in_step(request, hierarchy.target, passes, self.tokenizer, hierarchy.offloads)
