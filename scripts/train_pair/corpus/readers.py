"""Documentation in, plain text out: HTML, docstrings, JSON service models and perl pods.

The layout is that of ``layout.py``. Every reader takes a path and returns one document as a string,
empty where there is no prose.
"""

import ast
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.train_pair.corpus.layout import titled, wrap
from scripts.train_pair.corpus.pages import read_html, unpacked

ROLE = re.compile(r":[a-z:]+:`~?([^`<]+?)(?: <[^`]*>)?`")
DOUBLE = re.compile(r"``([^`]+)``")
SINGLE = re.compile(r"(?<![`\w])`([^`\n]+)`_{0,2}(?!`)")


def _markup(text: str) -> str:
    return SINGLE.sub(r'"\1"', DOUBLE.sub(r'"\1"', ROLE.sub(r'"\1"', text)))


def _definitions(node: ast.AST, depth: int) -> Iterator[str]:
    pad = "   " * depth
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        doc = ast.get_docstring(child)
        inner = list(_definitions(child, depth + 1)) if isinstance(child, ast.ClassDef) else []
        if not doc and not inner:
            continue
        if isinstance(child, ast.ClassDef):
            yield f"{pad}class {child.name}"
        else:
            yield wrap(f"{child.name}({ast.unparse(child.args)})", pad + "      ", pad)
        if doc:
            yield "\n".join((pad + "   " + s).rstrip() for s in _markup(doc).split("\n"))
        yield from inner


def python_docs(path: Path) -> str:
    """Docstrings of one module with the signatures they belong to."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return ""
    parts = list(_definitions(tree, 0))
    doc = ast.get_docstring(tree)
    if doc:
        parts.insert(0, _markup(doc))
    text = "\n\n".join(parts)
    return text if len(text) > 400 else ""


def source_code(path: Path) -> str:
    """A source file as it stands."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        return ""
    return text if max(map(len, text.split("\n"))) < 400 else ""


TAGS = re.compile(r"<[^>]+>")
SPLIT = re.compile(r"</?(?:p|ul|ol|note|important|dl|dt|dd|br)\s*/?>")
MARKS = ((r"</?(?:code|tt)>", '"'), (r"</?(?:b|strong)>", "**"), (r"</?(?:i|em)>", "*"))


def _fragment(markup: str | None, indent: str = "") -> str:
    """Cheap rendering of the short HTML of service models: no tree is built."""
    markup = markup or ""
    for pattern, mark in MARKS:
        markup = re.sub(pattern, mark, markup)
    out = []
    for part in SPLIT.split(markup):
        listed = "<li>" in part
        for item in part.split("<li>"):
            text = " ".join(html.unescape(TAGS.sub("", item)).split())
            if len(text) > 1:
                out.append(wrap(text, indent + "  ", indent + "* ") if listed else wrap(text, indent))
    return "\n\n".join(out)


def service_model(path: Path) -> str:
    """Prose of a botocore service model (``service-2.json`` or its gzip)."""
    model = json.loads(unpacked(path))
    parts = [_fragment(model.get("documentation"))]
    for name, operation in model.get("operations", {}).items():
        parts += [name, _fragment(operation.get("documentation"), "   ")]
    for name, shape in model.get("shapes", {}).items():
        body = [_fragment(shape.get("documentation"), "   ")]
        for member, spec in (shape.get("members") or {}).items():
            if isinstance(spec, dict) and spec.get("documentation"):
                body.append(f"   {member}\n" + _fragment(spec["documentation"], "      "))
        if any(body):
            parts += [f"class {name}", *body]
    return "\n\n".join(filter(None, parts))


def discovery(path: Path) -> str:
    """Descriptions in a Google API discovery document."""

    def walk(node: object, name: str, depth: int) -> Iterator[str]:
        if not isinstance(node, dict):
            return
        text, pad = node.get("description"), "   " * min(depth, 3)
        if isinstance(text, str) and len(text) > 40:
            yield f"{pad}{name}\n" + wrap(_markup(text), pad + "   ")
        for key, value in node.items():
            yield from walk(value, key, depth + (key not in ("properties", "parameters", "methods")))

    document = json.loads(path.read_bytes())
    return "\n\n".join(p for key in ("resources", "schemas") for p in walk(document.get(key), key, -1))


def rst_text(path: Path) -> str:
    """reStructuredText or Markdown with roles and literals rewritten."""
    return _markup(path.read_text("utf-8", "replace"))


POD = re.compile(r"([BCIFLSEXZ])<+\s?([^<>]*?)\s?>+")
POD_MARKS = {"B": '"', "C": '"', "F": '"', "I": "*"}


def pod_text(path: Path) -> str:
    """A perl pod: paragraphs wrapped, inner sequences rewritten."""

    def marked(m: re.Match[str]) -> str:
        sign = POD_MARKS.get(m[1], "")
        return sign + m[2].split("|")[0] + sign

    out: list[str] = []
    for block in re.split(r"\n\s*\n", path.read_text("utf-8", "replace")):
        if block.startswith("=head"):
            out.append(titled(block.split(" ", 1)[-1].strip(), "*" if block[5] == "1" else "="))
        elif block.startswith("=item"):
            out.append("* " + POD.sub(r"\2", block[5:]).strip())
        elif block.startswith((" ", "\t")):
            out.append("\n".join("   " + s.strip("\n") for s in block.expandtabs().split("\n")))
        elif not block.startswith("="):
            out.append(wrap(POD.sub(marked, POD.sub(marked, " ".join(block.split())))))
    return "\n\n".join(out)


READERS = {
    "html": read_html,
    "docstrings": python_docs,
    "code": source_code,
    "rst": rst_text,
    "service": service_model,
    "discovery": discovery,
    "pod": pod_text,
}
