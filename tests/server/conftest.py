from collections.abc import Iterator

import openai
import pytest

import triforce_tree
from scripts.checks.served import serving
from tests.support.processes.served import KEY, LIMITS, NAME, TEMPLATE, client_of, close_clients
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app


@pytest.fixture(scope="session")
def engine() -> Engine:
    made = triforce_tree.load(device="cpu", dtype="float32", levels=2)
    assert made.tokenizer is not None
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def url(engine: Engine) -> Iterator[str]:
    with serving(create_app(engine, Served(NAME, KEY, LIMITS, body=2**20))) as (address, _):
        yield address


@pytest.fixture(autouse=True)
def _closed_clients() -> Iterator[None]:
    yield
    close_clients()


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return client_of(url)
