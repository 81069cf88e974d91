"""The start and the end of a command's process, without what Python does only for long-lived processes."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pauses the garbage collector for imports, and exempts what they leave from all later collections.

    Modules live as long as the process, and to traverse them again and again takes a quarter of the imports'
    time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class QuickEnd:
    """Ends the process after all other handlers of its end, without the destruction of every object.

    With torch and transformers, Python destroys 700,000 objects, which takes a second. The operating system
    frees their memory anyway.

    Must be made before other modules are imported: the handler that is registered first runs last.

    Attributes:
        code: the exit code; None until the command has ended, and Python ends as usual without one.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self.code is not None:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(self.code)
            except (OSError, ValueError):
                pass  # Python reports a stream that cannot be written.
        # Libraries of nanobind, such as Triton, report what a usual end does not collect as leaks.
        gc.unfreeze()
