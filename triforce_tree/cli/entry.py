"""The command ``triforce-tree``: runs what ``arguments`` has parsed, and turns errors into one line.

Exit codes: 0 done, 1 a check failed or memory ran out, 2 bad input (one line on stderr says what),
130 ended by Ctrl-C.
"""

import argparse
import atexit
import errno
import gc
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module

from triforce_tree.cli.prompt import missing
from triforce_tree.runtime.progress_log import log_on_stderr, logged


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit code.

    Args:
        argv: the words of a command that another program runs; None for those of this process.
    """
    if argv is not None:
        return _main(list(argv), nullcontext())
    end = _QuickEnd()
    end.code = _main(sys.argv[1:], _uncollected())
    return end.code


def _main(words: list[str], imports: AbstractContextManager[None]) -> int:
    nowhere = sys.stdout is None
    _open_closed_streams()
    traceback = "--traceback" in words
    try:
        # This module is imported inside the handling of Ctrl-C, as are all modules that commands need.
        from triforce_tree.cli.arguments import parser

        args = parser().parse_args(words)
        if nowhere:
            return _failed("stdout is closed, and results go there; redirect it to a file or /dev/null", 2)
        check(args)
        with log_on_stderr():
            return _run(args, imports)
    except KeyboardInterrupt:
        # Where Ctrl-C interrupts code in a string, as dataclasses run it, CPython sets a flag and later ends
        # `python -m` by the signal, not with our exit code; running another string clears the flag.
        exec("")
        if "--json" in words and os.environ.get("RANK", "0") == "0":
            print(json.dumps({"interrupted": True}), flush=True)
        return _failed("interrupted", 130)
    except BrokenPipeError:
        # The reader of stdout has closed it; what is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, ImportError) as error:
        if traceback:
            raise
        return _failed(_message(error), 2)


def check(args: argparse.Namespace) -> None:
    """Refuses what options and small files reveal to be wrong, before libraries are imported, which takes
    seconds.

    Raises:
        ValueError, OSError: the message names the option or the file.
    """
    if said := missing(args):
        raise FileNotFoundError(said)
    getattr(import_module("triforce_tree.cli.early"), args.early)(args)


def _open_closed_streams() -> None:
    """Opens /dev/null for each stream that the shell closed (<&-, >&-), which the next file would replace."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _run(args: argparse.Namespace, imports: AbstractContextManager[None]) -> int:
    # These imports take seconds.
    with logged("importing torch and transformers"), imports:
        import torch
        from transformers.utils import logging as transformers_logging

        from triforce_tree.cli import console
        from triforce_tree.kernels.device import KernelError
        from triforce_tree.runtime import distributed
        from triforce_tree.runtime.devices import memory_is_short
        from triforce_tree.runtime.rank_watch import LostRankError

        command = import_module(args.module)

    # Progress bars and notices of these libraries would mix with our own.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # It would report every retry without a network.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if distributed.world_size() > 1 and not args.on_several_gpus:
        raise ValueError("this command runs in one process, without torchrun; only generate takes several")
    try:
        with console.first_rank_stdout():
            code = int(command.run(args))
        distributed.leave()
        return code
    except KernelError as error:
        if args.traceback:
            raise
        return _failed(_message(error), 1)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, LostRankError) and not args.traceback:
            return 1 if error.said else _failed(_message(error), 1)
        if args.traceback or not memory_is_short(error):
            raise
        less = "ask for shorter prompts or fewer texts at once"
        if isinstance(error, torch.OutOfMemoryError):
            less += ", or use --dtype bfloat16"
        return _failed(f"out of memory ({_message(error)}); {less}", 1)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        # An error of a stream has no file name; errors of files name the file.
        return f"{error.strerror}, where stdout or stderr goes; free some space, or redirect it elsewhere"
    if isinstance(error, ImportError):
        return f"a package is missing or does not load here ({error}); pip install triforce-tree brings all"
    return " ".join(str(error).split()) or type(error).__name__


def _failed(message: str, code: int) -> int:
    # Set by torchrun.
    rank = os.environ.get("RANK")
    # There is one write, because other ranks may write at the same time.
    sys.stderr.write(f"triforce-tree{f', rank {rank}' if rank else ''}: {message}\n")
    return code


@contextmanager
def _uncollected() -> Iterator[None]:
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


class _QuickEnd:
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
