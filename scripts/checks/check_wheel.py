"""Build the wheel, install it beside transformers and PyPI's `kernels`, and import it from there.

A wheel with a top-level folder `kernels` would overwrite the package of that name, and transformers
would no longer import. The same clash threatens in the repository's root, where the link `kernels`
comes first on the path.

transformers imports `kernels` only in the releases it wants, and its newest release may want one
that is not out yet. So this looks twice: at the installed transformers with the newest `kernels`,
and at the oldest supported transformers with the one it wants, where the import does happen. Without
PyPI's `kernels`, and our folder of that name in reach, all tests run.

Run by `make wheel-check`, with a Python that has the package's dependencies and `build`.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "triforce_tree"
LINKS = ("drafters", "kernels", "verify")

INSTALLED = """
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
import kernels, sys
import triforce_tree.api, triforce_tree.decoding.program
import triforce_tree.kernels.attention.backend
assert is_kernels_available() or not {wanted}, "transformers does not want this release of kernels"
for module in (kernels, triforce_tree):
    assert module.__file__.startswith(sys.prefix), module.__file__
"""

FROM_ROOT = """
from transformers import LlamaForCausalLM
import kernels, triforce_tree.api
assert kernels.__file__ and "site-packages" in kernels.__file__, kernels
assert triforce_tree.__file__.startswith({root!r}), triforce_tree.__file__
"""


def main() -> None:
    check_links()
    with tempfile.TemporaryDirectory(prefix="triforce-tree-wheel-") as folder:
        tmp = Path(folder)
        wheel = build(tmp / "dist")
        check_contents(wheel)
        python = install(wheel, tmp / "venv")
        elsewhere = tmp / "elsewhere"
        elsewhere.mkdir()
        for requirement, wanted in (("kernels", False), (oldest_transformers(), True)):
            pip(python, "install", "--quiet", "--no-compile", requirement)
            run(python, "-c", INSTALLED.format(wanted=wanted), cwd=elsewhere)
            run(python, "-c", FROM_ROOT.format(root=str(PACKAGE)), cwd=ROOT)
        pip(python, "check")
        run(python.with_name("triforce-tree"), "--help", cwd=elsewhere)
        run(python, "-m", "triforce_tree", "--help", cwd=ROOT)
    print(f"{wheel.name}: contents and imports are as they should be")


def check_links() -> None:
    for name in LINKS:
        link = ROOT / name
        need(link.is_symlink(), f"{name} must be a link to triforce_tree/{name}, not a folder")
        need(link.resolve() == PACKAGE / name, f"{name} points to {os.readlink(link)}")
        need(link.is_dir(), f"{name} is a link to triforce_tree/{name}, which does not exist; mend the link")
    need(
        not (PACKAGE / "kernels/__init__.py").exists(),
        "triforce_tree/kernels/__init__.py must not exist: `import kernels` in the repository's "
        "root would find it before PyPI's package",
    )


def build(dist: Path) -> Path:
    # An sdist, and the wheel from that: so the sdist is known to be complete. What a build requires was
    # installed by itself for the editable package.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT)
    (wheel,) = dist.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    own = f"triforce_tree-{version}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.startswith(own)}
    tree = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    need(files >= tree, f"not in the wheel: {sorted(tree - files)}; see package-data in pyproject")
    need(files <= tree, f"in the wheel, yet not of the package: {sorted(files - tree)}")
    need("triforce_tree/py.typed" in files, "triforce_tree/py.typed is missing")
    need(
        any(f.startswith("triforce_tree/pair/") and f.endswith(".safetensors") for f in files),
        "triforce_tree/pair/ holds no weights; check them out from git",
    )
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    need(version in changes, f"CHANGELOG.md does not mention version {version}")


def install(wheel: Path, where: Path) -> Path:
    """Returns a virtual environment with the wheel; all else is seen in the environment that runs this."""
    venv.create(where, with_pip=False)
    python = where / "bin" / "python"
    base = {"base": str(where), "platbase": str(where)}
    # Read as a path only: the editable install in there stays inactive.
    outer = Path(sysconfig.get_path("purelib", vars=base), "outer.pth")
    outer.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip(python, "install", "--quiet", "--no-compile", "--no-deps", "--force-reinstall", str(wheel))
    return python


def oldest_transformers() -> str:
    """Returns the requirement `transformers[kernels]==X.*`, X being the lower bound in pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        lines = tomllib.load(file)["project"]["dependencies"]
    (bounds,) = (line.partition(">=")[2] for line in lines if line.startswith("transformers>="))
    bound = bounds.partition(",")[0]
    return f"transformers[kernels]=={bound}.*"


def pip(python: Path, *arguments: str) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *arguments)


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    # PYTHONPATH or PYTHONSAFEPATH would decide what is imported.
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout)
        short = " ".join(str(part) for part in command if "\n" not in str(part))
        sys.exit(f"check_wheel: exit code {done.returncode} in {cwd}: {short}")


def need(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"check_wheel: {message}")


if __name__ == "__main__":
    main()
