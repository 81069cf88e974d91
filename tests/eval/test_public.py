"""Public data sets: rows in every schema, from files of every kind, prompts, and metrics by hand."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from triforce_tree.cli.bench import arguments
from triforce_tree.eval.public import metrics
from triforce_tree.eval.public.catalogue import (
    DATA_SETS,
    INFINITEBENCH,
    LONGBENCH,
    NARRATIVEQA,
    PG19,
    task_of,
)
from triforce_tree.eval.public.metrics import Expected
from triforce_tree.eval.public.prompts import Prompts, beginnings, template_of
from triforce_tree.eval.public.rows import Example, digest, examples
from triforce_tree.eval.text import token_ids
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer

# A row of each data set in its own columns.
ROWS: dict[str, dict[str, Any]] = {
    "pg19": {"short_book_title": "A", "publication_date": 1900, "url": "u", "text": "Once upon a time."},
    "narrativeqa": {
        "document": {"id": "1", "kind": "book", "text": "Ann met Bob.", "summary": {"text": "s"}},
        "question": {"text": "Whom did Ann meet?", "tokens": ["Whom"]},
        "answers": [{"text": "Bob", "tokens": ["Bob"]}, {"text": "He was Bob", "tokens": ["He"]}],
    },
    "longbench": {
        "input": "Who?", "context": "Ann met Bob.", "answers": ["Bob"], "length": 3, "dataset": "trec",
        "language": "en", "all_classes": ["Person", "Place"], "_id": "1",
    },
    "longbench-v2": {
        "_id": "1", "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short",
        "question": "Who?", "choice_A": "Ann", "choice_B": "Bob", "choice_C": "Cid", "choice_D": "Dan",
        "answer": "B", "context": "Ann met Bob.",
    },
    "infinitebench": {
        "id": 0, "context": "Ann met Bob.", "input": "Who?", "answer": ["Bob"],
        "options": ["Ann", "Bob", "Cid", "Dan"],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(PAIR / "target")


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_named(data: Any) -> str:
    """The task that the command takes without --task."""
    return arguments.PUBLIC[data.name][1] or ""


def test_help_names_every_data_set_and_its_task() -> None:
    assert arguments.PUBLIC.keys() == DATA_SETS.keys() == ROWS.keys()
    for name, (_, task) in arguments.PUBLIC.items():
        data = DATA_SETS[name]
        assert (task in data.tasks) == bool(data.tasks)
        assert (task_of(data, task or "") is None) == (task is None)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_schema(tmp_path: Path, name: str) -> None:
    data = DATA_SETS[name]
    [found] = examples(data, task_named(data), write(tmp_path / "rows.jsonl", ROWS[name]), 1)
    assert found.context == ("Once upon a time." if name == "pg19" else "Ann met Bob.")
    if name == "pg19":
        assert found.expected is None
        return
    assert found.expected is not None
    answers = {"narrativeqa": ["Bob", "He was Bob"], "longbench-v2": ["B"]}.get(name, ["Bob"])
    assert found.expected.answers == answers
    assert found.question.startswith("Who")
    classes = {"narrativeqa": [], "longbench": ["Person", "Place"]}
    assert found.expected.options == classes.get(name, ["Ann", "Bob", "Cid", "Dan"])


def test_files_folders_archives_and_parquet_say_the_same(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{**ROWS["longbench"], "context": f"Text {n}."} for n in range(3)]
    write(tmp_path / "data" / "qasper.jsonl", *rows)
    write(tmp_path / "data" / "trec.jsonl", {**rows[0], "context": "Another."})
    (tmp_path / "list.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for path in (tmp_path / "data").iterdir():
            archive.write(path, f"data/{path.name}")
    expected = [f"Text {n}." for n in range(3)]
    for name in ("data/qasper.jsonl", "data", ".", "list.json", "rows.parquet", "data.zip"):
        found = examples(LONGBENCH, "qasper", str(tmp_path / name), 3)
        assert [example.context for example in found] == expected, name
        assert digest(found) == digest(examples(LONGBENCH, "qasper", str(tmp_path / "data"), 3))
    assert digest(found[:2]) != digest(found)


def test_different_texts_come_first(tmp_path: Path) -> None:
    rows = [{**ROWS["infinitebench"], "context": text, "input": asked} for text, asked in ("ax", "ay", "bz")]
    path = write(tmp_path / "longbook_qa_eng.jsonl", *rows)
    for count, asked in ((1, "x"), (2, "xz"), (3, "xzy")):
        found = examples(INFINITEBENCH, "longbook_qa_eng", path, count)
        assert "".join(example.question for example in found) == asked


BAD = {
    "nothing there": ("nowhere.jsonl", None, r"no such file: '.*nowhere\.jsonl'; --data takes"),
    "no rows": ("notes.txt", "hello", r"is no file of rows; --data takes a \.jsonl"),
    "no JSON": ("rows.jsonl", "hello\n", r"holds no JSON objects"),
    "no object": ("rows.json", "[3]", r"a int instead of an object"),
    "no column": ("rows.jsonl", '{"text": "x"}\n', "no column 'context', but text; needed are context"),
    "no answer": ("rows.jsonl", '{"context": "x", "input": "y", "answers": [], "all_classes": 0}', "no ans"),
    "too few": ("rows.jsonl", json.dumps(ROWS["longbench"]), r"has 1 rows here, 2 are wanted; .* --prompts"),
    "no zip": ("rows.zip", "hello", r"is no zip archive"),
    "empty folder": ("", None, r"has no qasper\.jsonl with the columns context"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_told_in_a_sentence(tmp_path: Path, case: str) -> None:
    name, content, message = BAD[case]
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        examples(LONGBENCH, "qasper", str(tmp_path / name), 2)


def test_an_archive_without_the_task_says_so(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/trec.jsonl", "{}")
    with pytest.raises(ValueError, match=r"has no qasper\.jsonl in it; give another --data or --task"):
        examples(LONGBENCH, "qasper", str(tmp_path / "data.zip"), 1)
    with pytest.raises(ValueError, match="longbench has no task 'poems'; use one of narrativeqa, qasper"):
        task_of(LONGBENCH, "poems")
    assert task_of(LONGBENCH, "qasper_e") == task_of(LONGBENCH, "qasper")


@pytest.mark.parametrize("data", [PG19, LONGBENCH])
def test_without_a_network_the_sentence_names_the_offline_way(data: Any) -> None:
    with pytest.raises(ValueError, match="cannot be fetched from") as caught:
        examples(data, task_named(data), None, 1)
    message = str(caught.value)
    assert "\n" not in message
    assert "give --data FILE, a .jsonl, .json, .parquet, .csv or .zip file" in message
    assert data.schema in message


def test_what_was_fetched_before_is_read_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", json.dumps(ROWS["longbench"]))

    def held(repository: str, name: str, repo_type: str, local_files_only: bool) -> str:
        assert (repository, repo_type, local_files_only) == (LONGBENCH.repository, "dataset", True)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", held)
    [found] = examples(LONGBENCH, "qasper", None, 1)
    assert found.context == "Ann met Bob."


def test_long_prompts_lose_the_middle_of_their_text_alone(tokenizer: Any) -> None:
    text = " ".join(f"word{n}" for n in range(400))
    example = Example(text, "Who is it?", Expected(["x"], []))
    task = task_of(NARRATIVEQA, "")
    assert task is not None
    made = Prompts(tokenizer, "Read this.\n" + task.prompt)
    whole = made.prompt(example, 10**6)
    filled = task.prompt.format(context=text, input="Who is it?")
    assert whole == token_ids(tokenizer, f"Read this.\n{filled}")
    cut = made.prompt(example, 120)
    assert len(cut) == 120
    shown = str(tokenizer.decode(cut))
    assert "Read this.\nword0 word1" in shown
    assert "word399\n\nQuestion: Who is it?" in shown
    assert "word200 " not in shown
    with pytest.raises(ValueError, match="a prompt of 12 tokens has no place"):
        made.prompt(example, 12)


def test_options_are_lettered_and_braces_of_texts_stay(tokenizer: Any) -> None:
    example = Example("f = {context} {input}", "{options}?", Expected(["b"], ["a", "b"]))
    shown = Prompts(tokenizer, "{context}|{input}|{options}|").prompt(example, 1000)
    assert str(tokenizer.decode(shown)).endswith("f = {context} {input}|{options}?|A. a\nB. b|")


def test_books_are_cut_at_their_beginning(tokenizer: Any) -> None:
    found = [Example("word " * 200, "", None), Example("other " * 300, "", None)]
    cut = beginnings(found, tokenizer, 100)
    assert [len(ids) for ids in cut] == [100, 100]
    assert cut[0] == token_ids(tokenizer, found[0].context)[:100]
    with pytest.raises(ValueError, match=r"text 0 of the data has .* fewer than the 5,000 of --lengths"):
        beginnings(found, tokenizer, 5000)


def test_own_templates(tmp_path: Path) -> None:
    task = task_of(LONGBENCH, "qasper")
    assert task is not None
    path = tmp_path / "templates.json"
    path.write_text(json.dumps({"qasper": "T {context} Q {input}", "trec": "no place"}))
    assert template_of(str(path), "qasper", task) == "T {context} Q {input}"
    assert template_of(None, "qasper", task) == task.prompt
    with pytest.raises(ValueError, match=r"the template of task 'trec' in .* needs \{context\} once"):
        template_of(str(path), "trec", task)
    with pytest.raises(ValueError, match="has no template for task 'lcc'"):
        template_of(str(path), "lcc", task)


def test_every_template_can_be_filled() -> None:
    for data in DATA_SETS.values():
        for name, task in data.tasks.items():
            assert task.prompt.count("{context}") == 1, name
            assert task.answer_tokens > 0


def expected(*answers: Any, options: tuple[str, ...] = ()) -> Expected:
    return Expected(list(answers), list(options))


PEOPLE = ("Ann", "Bob", "Cid", "Dan")
# Metric, text, what is expected, score.
SCORES = [
    (metrics.f1, "The cat, sat!", expected("a cat sat down"), 2 * 2 / (2 + 3)),
    (metrics.f1, "nothing", expected("cat", "dog"), 0),
    (metrics.f1, "dog", expected("cat", "the Dog"), 1),
    (metrics.f1, "", expected("cat"), 0),
    (metrics.character_f1, "北京。", expected("北 京市"), 2 * 2 / (2 + 3)),
    (metrics.rouge_l, "a b c d", expected("a x c y d"), 2 * 3 / (4 + 5)),
    (metrics.rouge_l, "d c b a", expected("a b c d"), 2 * 1 / 8),
    (metrics.classification, "It is Number or Place", expected("Place", options=("Place", "Number")), 0.5),
    (metrics.classification, "Number of it", expected("Number of it", options=("Number", "Number of it")), 1),
    (metrics.classification, "Number", expected("Place", options=("Number", "Place")), 0),
    (metrics.numbers, "Paragraph 3 and 4", expected("Paragraph 3"), 0.5),
    (metrics.numbers, "none", expected("3"), 0),
    (metrics.code_similarity, "# a comment\nx = 1\ny = 2", expected("x = 1"), 1),
    (metrics.code_similarity, "abcd", expected("abxd"), 0.75),
    (metrics.choice, "B. Bob", expected("Bob", options=PEOPLE), 1),
    (metrics.choice, " (B) since", expected("B", options=PEOPLE), 1),
    (metrics.choice, "The answer is: Bob.", expected("B", options=PEOPLE), 1),
    (metrics.choice, "I think that the correct answer is (C).", expected("Cid", options=PEOPLE), 1),
    (metrics.choice, "Dan", expected("Ann", options=PEOPLE), 0),
    (metrics.choice, "", expected("Ann", options=PEOPLE), 0),
    (metrics.first_number, "It is 2.50, not 3", expected(2.5), 1),
    (metrics.first_number, "3 or 2", expected(2), 0),
    (metrics.first_digits, "key: 00123.", expected("00123"), 1),
    (metrics.first_digits, "123", expected("00123"), 0),
    (metrics.last_number, "The value is 3, so `-4`.", expected(-4), 1),
    (metrics.last_number, "4 it is", expected(4), 0),
    (metrics.leading_numbers, "1, 2, 9, 4", expected(1, 2, 3, 4), 0.5),
    (metrics.names_word, 'said "jack".', expected("JACK"), 1),
    (metrics.names_word, "Jackson", expected("JACK"), 0),
    (metrics.first_line(metrics.f1), "\ncat\nQuestion: more", expected("cat"), 1),
]  # fmt: skip


@pytest.mark.parametrize("metric, text, right, score", SCORES)
def test_scores(metric: metrics.Metric, text: str, right: Expected, score: float) -> None:
    assert metric(text, right) == pytest.approx(score)
