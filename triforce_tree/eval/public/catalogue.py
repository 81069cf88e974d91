"""The public data sets by name: where their rows are, what their columns hold, prompts and metrics.

No data is bundled, and prompts are worded here: to compare with published scores, give the data set's own
prompts (``bench ... --templates``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from triforce_tree.eval.public import metrics
from triforce_tree.eval.public.metrics import Metric

_ASK = "{context}\n\nQuestion: {input}\nAnswer in a few words.\nAnswer:"
_CHOOSE = "{context}\n\nQuestion: {input}\n{options}\nAnswer with the letter of the right option.\nAnswer:"
_SUMMARIZE = "{context}\n\nSummary of the text above:"
_AS_IT_IS = "{context}\n\n{input}\n"
_EXAMPLES = "{context}\n{input}"
_CODE = "{context}{input}"


@dataclass(frozen=True)
class Task:
    """What is asked about a text.

    Attributes:
        metric: of an answer.
        metric_name: for people.
        answer_tokens: most tokens of an answer, as the data set's authors set it.
        prompt: with ``{context}``, ``{input}`` and, for a multiple choice, ``{options}``.
    """

    metric: Metric
    metric_name: str
    answer_tokens: int
    prompt: str = _ASK


@dataclass(frozen=True)
class DataSet:
    """One public data set.

    Attributes:
        name: of the command.
        what: one line for people.
        licence: of the data.
        repository: on the hub.
        file: in the repository, with ``{task}``; for a zip archive ``archive.zip:member``. None: the split
            named ``test``, read by the datasets library.
        columns: where a row has the ``context``, ``input``, ``answers`` and ``options``: dotted paths, which
            go through lists; several separated by commas are gathered into a list.
        tasks: by name; ``""`` where there is only one. None for texts without questions.
    """

    name: str
    what: str
    licence: str
    repository: str
    columns: Mapping[str, str]
    file: str | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict)

    @property
    def schema(self) -> str:
        """The columns in one phrase, for error messages; where their names do not say it, what they hold."""
        named = self.columns.items()
        return ", ".join(path if path == what else f"{path} ({what})" for what, path in named)


def _f1(tokens: int, prompt: str = _ASK) -> Task:
    return Task(metrics.f1, "F1", tokens, prompt)


def _rouge(tokens: int, prompt: str = _SUMMARIZE) -> Task:
    return Task(metrics.rouge_l, "ROUGE-L", tokens, prompt)


def _code() -> Task:
    return Task(metrics.code_similarity, "edit similarity", 64, _CODE)


def _exact(metric: Metric, tokens: int, prompt: str = _AS_IT_IS) -> Task:
    return Task(metric, "accuracy", tokens, prompt)


def _examples(metric: Metric, name: str, tokens: int) -> Task:
    return Task(metrics.first_line(metric), name, tokens, _EXAMPLES)


_QUERY_SUMMARY = "{context}\n\nQuestion: {input}\nAnswer:"
_COUNT = "{context}\n\nHow many different paragraphs are there above, repeated ones counted once?\nAnswer:"
_FIND = "{context}\n\nSummary: {input}\nWhich paragraph above is this a summary of? Answer: Paragraph"

PG19 = DataSet(
    "pg19",
    "books of Project Gutenberg from before 1919 (Rae et al., arXiv 1911.05507)",
    "Apache-2.0, the books public domain",
    "emozilla/pg19-test",
    {"context": "text"},
)
NARRATIVEQA = DataSet(
    "narrativeqa",
    "questions about whole books and film scripts (Kočiský et al., arXiv 1712.07040)",
    "Apache-2.0",
    "deepmind/narrativeqa",
    {"context": "document.text", "input": "question.text", "answers": "answers.text"},
    tasks={"": _rouge(128, _ASK)},
)
LONGBENCH = DataSet(
    "longbench",
    "LongBench's English tasks; with _e, those of LongBench-E (Bai et al., arXiv 2308.14508)",
    "none is stated for all of the data",
    "zai-org/LongBench",
    {"context": "context", "input": "input", "answers": "answers", "options": "all_classes"},
    file="data.zip:data/{task}.jsonl",
    tasks={
        "narrativeqa": _f1(128),
        "qasper": _f1(128),
        "multifieldqa_en": _f1(64),
        "hotpotqa": _f1(32),
        "2wikimqa": _f1(32),
        "musique": _f1(32),
        "gov_report": _rouge(512),
        "qmsum": _rouge(512, _QUERY_SUMMARY),
        "multi_news": _rouge(512),
        "trec": _examples(metrics.classification, "accuracy", 64),
        "triviaqa": _examples(metrics.f1, "F1", 32),
        "samsum": _examples(metrics.rouge_l, "ROUGE-L", 128),
        "passage_count": _exact(metrics.numbers, 32, _COUNT),
        "passage_retrieval_en": _exact(metrics.numbers, 32, _FIND),
        "lcc": _code(),
        "repobench-p": _code(),
    },
)
LONGBENCH_V2 = DataSet(
    "longbench-v2",
    "multiple choice on texts of up to 2 million words (Bai et al., arXiv 2412.15204)",
    "Apache-2.0",
    "zai-org/LongBench-v2",
    {
        "context": "context",
        "input": "question",
        "answers": "answer",
        "options": "choice_A,choice_B,choice_C,choice_D",
    },
    file="data.json",
    tasks={"": _exact(metrics.choice, 128, _CHOOSE)},
)
INFINITEBENCH = DataSet(
    "infinitebench",
    "tasks on more than 100,000 tokens (Zhang et al., arXiv 2402.13718)",
    "Apache-2.0",
    "xinrongzhang2022/InfiniteBench",
    {"context": "context", "input": "input", "answers": "answer", "options": "options"},
    file="{task}.jsonl",
    tasks={
        "passkey": _exact(metrics.first_digits, 6),
        "number_string": _exact(metrics.first_digits, 12),
        "kv_retrieval": _exact(metrics.names_word, 50),
        "longbook_sum_eng": _rouge(1200),
        "longbook_choice_eng": _exact(metrics.choice, 40, _CHOOSE),
        "longbook_qa_eng": _f1(40),
        "longbook_qa_chn": Task(metrics.character_f1, "F1 of characters", 40),
        "longdialogue_qa_eng": _exact(metrics.names_word, 40),
        "math_find": _exact(metrics.first_number, 3),
        "math_calc": _exact(metrics.leading_numbers, 30_000),
        "code_run": _exact(metrics.last_number, 5),
        "code_debug": _exact(metrics.choice, 5, _CHOOSE),
    },
)
DATA_SETS = {each.name: each for each in (PG19, NARRATIVEQA, LONGBENCH, LONGBENCH_V2, INFINITEBENCH)}


def task_of(data: DataSet, name: str) -> Task | None:
    """The task of this name; None for texts without questions.

    Raises:
        ValueError: the data set has no such task.
    """
    if not data.tasks:
        return None
    # LongBench-E has the same tasks with texts of other lengths.
    known = data.tasks.get(name) or (data.tasks.get(name.removesuffix("_e")) if data is LONGBENCH else None)
    if known is None:
        raise ValueError(f"{data.name} has no task {name!r}; use one of {', '.join(data.tasks)}")
    return known
