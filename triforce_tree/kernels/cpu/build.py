"""Compiles C kernels with the machine's C compiler, which Triton also needs.

A library is compiled at its first use into ``~/.cache/triforce-tree/kernels`` (or below ``XDG_CACHE_HOME``),
once for each version of sources and flags.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from triforce_tree.runtime.files.writing import flush, user_cache
from triforce_tree.runtime.progress_log import logged

_FLAGS = ("-O3", "-std=gnu11", "-fopenmp-simd", "-pthread", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")


def shared_library(source: Path, instructions: Sequence[str], more: Sequence[str] = ()) -> Path:
    """Returns the path of a compiled C file, which is compiled if it does not exist.

    Args:
        source: C file, which may include any header of this folder and of those in it.
        instructions: Linux's names of the instruction sets that ``source`` uses.
        more: further flags of the compiler.

    Raises:
        OSError: no compiler is found, or it fails.
    """
    # Flags of compilers are Linux's names with other separators.
    named = (name.replace("avx512_", "avx512").replace("amx_", "amx-") for name in instructions)
    flags = (*_FLAGS, *(f"-m{name}" for name in named), *more)
    compiler = shlex.split(os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), ""))
    if not compiler:
        raise OSError(
            f"the kernel needs a C compiler, and none of {', '.join(_COMPILERS)} is found; install gcc"
        )
    headers = sorted(Path(__file__).parent.rglob("*.h"))
    contents = (path.read_bytes() for path in (source, *headers))
    words = (word.encode() for word in (*compiler, *flags))
    version = hashlib.sha256(b"\0".join([*contents, *words]))
    folder = user_cache("kernels")
    path = folder / f"{source.stem}-{version.hexdigest()[:16]}.so"
    if _loads(path):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # The file gets its final name when it is complete, because another process may build it too.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = Path(own) / path.name
        command = [*compiler, *flags, str(source), "-o", str(built), "-lm"]
        with logged(f"compiling {source.name} for this processor, once"):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(
                f"the kernel cannot be compiled: {' '.join(command)} exited with {done.returncode}: "
                f"{done.stderr.strip()[-500:]}; use gcc 11 or clang 12 or newer (set CC to choose a compiler)"
            )
        with built.open("rb") as file:
            flush(file.fileno())
        built.replace(path)
    return path


def _loads(path: Path) -> bool:
    """Returns whether a library exists and is complete; a truncated file cannot be loaded."""
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True
