"""What Triton compiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compiled() -> Iterator[list[str]]:
    """Yields a list that gets the names of the kernels that Triton compiles inside the context."""
    from triton import knobs

    names: list[str] = []

    def hook(*, fn: Any, **_: object) -> None:
        names.append(fn.name)

    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, hook
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before
