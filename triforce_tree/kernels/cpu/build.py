"""Compilation of C kernels with the machine's C compiler, which Triton needs as well.

A library is compiled on first use into ``~/.cache/triforce-tree/kernels`` (or below ``XDG_CACHE_HOME``), once
per version of sources and flags.
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

from triforce_tree.runtime.files.replacing import flush
from triforce_tree.runtime.files.user_folders import user_cache
from triforce_tree.runtime.telling import told

_FLAGS = ("-O3", "-std=gnu11", "-fopenmp-simd", "-pthread", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")


def shared_library(
    source: Path, headers: Sequence[Path], instructions: Sequence[str], more: Sequence[str] = ()
) -> Path:
    """The path of a compiled C file.

    Args:
        source: to compile.
        headers: that it includes.
        instructions: of the processor that it uses, by their names in Linux.
        more: further flags of the compiler.

    Raises:
        OSError: no compiler is found, or it fails.
    """
    # Compiler flags are Linux's names, but for the separators.
    named = (name.replace("avx512_", "avx512").replace("amx_", "amx-") for name in instructions)
    flags = (*_FLAGS, *(f"-m{name}" for name in named), *more)
    compiler = shlex.split(os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), ""))
    if not compiler:
        raise OSError(
            f"the kernel needs a C compiler, and none of {', '.join(_COMPILERS)} is found; install gcc"
        )
    contents = (path.read_bytes() for path in (source, *headers))
    words = (word.encode() for word in (*compiler, *flags))
    version = hashlib.sha256(b"\0".join([*contents, *words]))
    folder = user_cache("kernels")
    path = folder / f"{source.stem}-{version.hexdigest()[:16]}.so"
    if _loads(path):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # Moved to its final name only when complete: another process may build the same file.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = Path(own) / path.name
        command = [*compiler, *flags, str(source), "-o", str(built), "-lm"]
        with told(f"compiling {source.name} for this processor, once"):
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
    """Returns whether a library exists and is complete; a truncated file is compiled again."""
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True
