"""Measures the cells of ``plan``: timed generations, overlaps of policies, attention, acceptance by rank."""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import Any

from transformers import PreTrainedTokenizerBase

from scripts.benchmarks.paper import attention, plan, policies, policy_overlap
from scripts.benchmarks.paper.no_draft import without_draft
from triforce_tree.bench import texts as text
from triforce_tree.bench.needle import Haystack
from triforce_tree.bench.results import Record, repeated_share
from triforce_tree.check import overlap
from triforce_tree.config import load_arguments
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.engine import Engine
from triforce_tree.verify.sampling import ProbsFromLogits

_WARM_UP_TOKENS = 4
# Times of a text are kept after each of so many parts of it.
_PARTS = 8
_RANKS = 8
# Tokens of a text that are given to all levels after its prompt.
_FOLLOWING = 65


class Cells:
    """Measures the cells of one run.

    Args:
        timed: models and settings of timed generations; its options are "our settings".
        compared: for all else, where times do not matter: the same, or the pair that ``timed`` was inflated
            from, which computes the same function.
        documents: the text of all prompts.
        sizes: of the run.
        own_budget: whether the user gave a budget, which "our settings" then keep.
        seed: of all draws.
        wanted: whether to continue; a generation ends where it says no.
    """

    def __init__(
        self,
        timed: Engine,
        compared: Engine,
        documents: Sequences[str],
        sizes: plan.Sizes,
        own_budget: bool,
        seed: int,
        wanted: Callable[[], bool],
    ) -> None:
        self._timed, self._compared, self._documents = timed, compared, documents
        self._sizes, self._own_budget, self._seed, self._wanted = sizes, own_budget, seed, wanted
        self._cut: dict[tuple[int, int], list[list[int]]] = {}
        self._received: dict[tuple[str, int], Any] = {}

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        assert self._compared.tokenizer is not None, "the command line has checked it"
        return self._compared.tokenizer

    def measure(self, key: Record) -> Record:
        """Returns the values of a cell of one prompt."""
        kinds: dict[str, Callable[[Record], Record]] = {
            "speed": self._speed, "overlap": self._overlap, "attention": self._attention,
            "ranks": self._ranks,
        }  # fmt: skip
        return kinds[key["cell"]](key)

    def _prompts(self, length: int, count: int) -> list[list[int]]:
        if (length, count) not in self._cut:
            self._cut[length, count] = text.prompts(self._documents, self._tokenizer, length, count)
        return self._cut[length, count]

    def _given(self, key: Record) -> list[int]:
        """Returns a prompt and the tokens after it."""
        return self._prompts(key["context"] + _FOLLOWING, self._sizes.prompts)[key["prompt"]]

    def _speed(self, key: Record) -> Record:
        engine, batch = self.engine(key), key["batch"]
        if batch > 1:
            prompts = self._prompts(key["context"], batch)
        else:
            prompts = [self._prompts(key["context"], self._sizes.prompts)[key["prompt"]]]
        new, seed = key["new_tokens"], self._seed + key["prompt"]
        to_probs = ProbsFromLogits.at(key["temperature"])
        with engine.program(prompts, new, to_probs) as program:
            program.prefill(prompts)
            timing = _Timing(program, to_probs, prompts, seed, self._wanted)
            # Plain decoding takes the same time for every token, and few are enough.
            plain = max(_WARM_UP_TOKENS, self._sizes.new_tokens // 2)
            for drafts in (True, False):
                timing.decode(min(_WARM_UP_TOKENS, new), drafts)
            found = timing.decode(new, drafts=True)
            return {**found, "plain_ms": timing.decode(min(plain, new), drafts=False)["ms"]}

    def engine(self, key: Record) -> Engine:
        """Returns the engine of a timed cell."""
        changes, decoder = key["changes"], key["decoder"]
        budget = changes.get("budget", self._sizes.budget_at(key["context"]))
        recent = plan.recent_at(budget)
        cache = {"budget": budget, "recent": recent, "chunk": changes.get("chunk", plan.CHUNK)}
        more: Record = {"prefix_cache": False}
        if "offload" in changes:
            more["offload"] = changes["offload"]
        if decoder == "ours":
            if not self._own_budget and not plan.uses_own_budget(key["context"]):
                more |= cache
            return self._timed.with_options(**load_arguments(more))
        if decoder == "suffix":
            bare = self._timed.with_options(levels=2, **load_arguments(more))
            bare = bare.with_drafter(None)
            return bare
        one, two = changes.get("gamma_1", plan.GAMMA_1), changes.get("gamma_2", plan.GAMMA_2)
        more |= {"tree": f"chain:{one}", "other_trees": "none", "runner_ups": False}
        if decoder == "naive":
            return self._timed.with_options(
                levels=2, **load_arguments({**(more | {"tree": f"chain:{two}"}), "rounds": 1})
            )
        more |= cache | {"levels": 3, "gamma": two, "refresh": 0, "retrieval_weight_bits": 16}
        if decoder == "no-hierarchy":
            return without_draft(self._timed.with_options(**load_arguments({**more, "rounds": two})))
        chosen = policies.newest if decoder == "streaming" else None
        rounds = plan.rounds(one, two)
        return self._timed.with_options(**load_arguments({**more, "rounds": rounds, "select_chunks": chosen}))

    def _overlap(self, key: Record) -> Record:
        found: dict[str, list[float]] = {}
        for number, (tokens, prompt) in enumerate(self._texts(key)):
            received = self._heavy(key, number, tokens[:prompt])
            names = {*plan.POLICY_OF.values()} - ({"H2O"} if received is None else set())
            chosen = [p for p in policy_overlap.POLICIES if p.name in names and p.chunk in (1, plan.CHUNK)]
            values = policy_overlap.measure(
                self._compared, tokens, prompt, key["budget"], chosen, received,
                plan.recent_at(key["budget"]),
            )  # fmt: skip
            for policy, one in zip(chosen, values, strict=True):
                found.setdefault(policy.name, []).extend(one)
        return {"overlap": {name: sum(values) / len(values) for name, values in found.items()}}

    def _texts(self, key: Record) -> list[tuple[list[int], int]]:
        """Returns texts with the number of tokens of their prompts."""
        if key["text"] == "text":
            return [(self._given(key), key["context"])]
        hay = Haystack(self._documents[0], self._tokenizer, key["context"])
        made = []
        for depth in plan.NEEDLE_DEPTHS:
            needle = hay.needle(key["context"], depth, key["prompt"], self._seed)
            answer = text.token_ids(self._tokenizer, f" {needle.number}")
            made.append(([*needle.prompt, *answer], len(needle.prompt)))
        return made

    def _heavy(self, key: Record, number: int, prompt: Sequences[int]) -> Any:
        """Returns the attention that H2O selects by; None where a layer does not see all of the prompt."""
        model = self._compared.target.model
        if not attention.sees_everything(model):
            return None
        place = (f"{key['text']}/{key['prompt']}/{number}", key["context"])
        if place not in self._received:
            self._free()
            # Of the last texts alone, since budgets follow each other.
            self._received = {p: v for p, v in self._received.items() if p[1] == key["context"]}
            self._received[place] = policies.received_attention(model, prompt)
        return self._received[place]

    def _attention(self, key: Record) -> Record:
        self._free()
        model = self._compared.target.model
        if not attention.sees_everything(model):
            raise ValueError(
                "figure-3 needs a target whose layers all see the whole text, without windows or recurrent "
                "layers; leave it out of --items"
            )
        layers, kept = attention.recovered(model, self._given(key), key["context"], key["budget"])
        return {"recovered": layers, "kept": kept}

    def _free(self) -> None:
        """transformers' cache and ours may not fit the device at once."""
        for engine in (self._timed, self._compared):
            with engine.generation():
                engine.release()

    def _ranks(self, key: Record) -> Record:
        engine = self._compared.with_options(
            budget=(budget := self._sizes.budget_at(key["context"])),
            advanced={"recent": plan.recent_at(budget)},
        )
        steps = list(
            overlap.teacher_forced(
                engine, self._given(key), key["context"], key["temperature"], seed=self._seed
            )
        )
        return {"acceptance": overlap.acceptance_by_rank(steps, _RANKS, greedy=False, seed=self._seed)}


class _Timing:
    """Decodes the same prompts again and again, drafting or plainly, after one prefill.

    Args:
        program: whose cache holds the prompts.
        wanted: whether to continue, asked after each pass.
    """

    def __init__(
        self,
        program: DecodingProgram,
        to_probs: ProbsFromLogits,
        prompts: Sequences[list[int]],
        seed: int,
        wanted: Callable[[], bool],
    ) -> None:
        self._program, self._to_probs, self._prompts = program, to_probs, prompts
        self._seed, self._wanted = seed, wanted

    def decode(self, new_tokens: int, drafts: bool) -> Record:
        """Decodes until the first text has ``new_tokens`` tokens; a token of a batch is one of each text."""
        loop = DecodingLoop.over(self._program, self._to_probs, self._seed)
        if not drafts:
            loop.policy.fixed = 0
        sequences = [Sequence(prompt, Ending(new_tokens)) for prompt in self._prompts]
        loop.begin(sequences, cached=True)
        stamps: list[tuple[float, float]] = []
        for _ in loop.decode():
            counts = [len(sequence.new) for sequence in sequences]
            stamps.append((loop.decode_seconds, sum(counts) / len(counts)))
            if max(counts) >= new_tokens or not self._wanted():
                break
        levels = loop.levels
        by_tokens = {}
        for part in range(1, _PARTS + 1):
            count = new_tokens * part // _PARTS
            # The last stamp, where a run ends early or texts of a batch differ in length.
            seconds, had = next((s for s in stamps if s[1] >= count), stamps[-1])
            by_tokens[str(count)] = 1e3 * seconds / had
        return {
            "ms": 1e3 * stamps[-1][0] / stamps[-1][1],
            "ms_by_tokens": by_tokens,
            "acceptance": {v.name: v.acceptance_rate for v in levels if v.acceptance_rate is not None},
            "tokens_per_pass": levels[-1].mean_accepted_length,
            "repeated_8grams": sum(repeated_share(each.new) for each in sequences) / len(sequences),
        }
