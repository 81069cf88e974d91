"""Documentation in, plain text out: HTML, docstrings, JSON service models and perl pods.

The layout is that of plain-text manuals: paragraphs wrapped at 70 columns, literals in double
quotes, emphasis between asterisks, titles underlined, nested blocks indented by three spaces. Every
reader takes a path and returns one document as a string, empty where there is no prose.
"""

import ast
import gzip
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

from lxml import etree
from lxml import html as lxml_html

WIDTH = 70
SKIPPED = {
    "script",
    "style",
    "head",
    "nav",
    "footer",
    "aside",
    "svg",
    "form",
    "button",
    "header",
    "noscript",
    "iframe",
    "input",
    "select",
    "math",
    "template",
}
SKIPPED_CLASSES = (
    "sphinxsidebar",
    "related",
    "footer",
    "headerlink",
    "sidebar",
    "navigation",
    "breadcrumb",
    "toctree-wrapper",
    "rustdoc-breadcrumbs",
    "src",
    "nav",
    "lineno",
    "linenos",
    "copybtn",
    "navheader",
    "navfooter",
    "toc",
    "bottomnav",
    "topnav",
)
LITERAL = {"code", "tt", "kbd", "samp", "var"}
BLOCKS = {
    "p",
    "div",
    "section",
    "article",
    "main",
    "ul",
    "ol",
    "dl",
    "dt",
    "dd",
    "li",
    "pre",
    "table",
    "blockquote",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "tr",
    "td",
    "th",
    "tbody",
    "thead",
    "tfoot",
    "body",
    "details",
    "summary",
    "figure",
    "hr",
    "center",
    "fieldset",
    "caption",
    "colgroup",
}
UNDERLINES = {"h1": "*", "h2": "=", "h3": "-", "h4": "~", "h5": "~", "h6": "~"}
BREAKS = re.compile(r"\s*\n\s*")
CHUNKS = re.compile(r"\s+|[^\s-]*[A-Za-z]{2}-(?=[A-Za-z]{2})|\S+")


def wrap(text: str, indent: str = "", first: str | None = None) -> str:
    """Greedy fill at ``WIDTH`` columns; inner double spaces stay, words may break after hyphens."""
    lines: list[str] = []
    prefix = indent if first is None else first
    room, line, gap = WIDTH - len(indent), "", ""
    for chunk in CHUNKS.findall(text.strip()):
        if chunk.isspace():
            gap = chunk.replace("\n", " ")[:2]
        elif not line:
            line, gap = chunk, ""
        elif len(line) + len(gap) + len(chunk) <= room:
            line, gap = line + gap + chunk, ""
        else:
            lines.append(prefix + line)
            prefix, line, gap = indent, chunk, ""
    if line:
        lines.append(prefix + line)
    return "\n".join(lines)


def _skip(node: etree._Element) -> bool:
    if not isinstance(node.tag, str) or node.tag in SKIPPED:
        return True
    classes = node.get("class")
    if classes and any(name in SKIPPED_CLASSES for name in classes.split()):
        return True
    return node.get("role") in ("navigation", "search") or node.get("id") in ("sidebar", "toc")


def _inline(node: etree._Element, literal: bool = False) -> str:
    if _skip(node):
        return ""
    tag = node.tag
    if tag == "br":
        return "\n"
    quoted = tag in LITERAL and not literal
    pieces = [node.text or ""]
    for child in node:
        pieces.append(_inline(child, literal or quoted))
        pieces.append(child.tail or "")
    text = "".join(pieces)
    bare = text.strip()
    if not bare or literal:
        return text
    if quoted:
        return f'"{bare}"'
    if tag in ("em", "i", "cite", "dfn") and len(bare) < 200:
        return f"*{bare}*"
    if tag in ("strong", "b") and len(bare) < 200:
        return f"**{bare}**"
    return text


def _table(node: etree._Element, indent: str, out: list[str]) -> None:
    rows = []
    for row in node.iter("tr"):
        cells = [BREAKS.sub(" ", _inline(c)).strip() for c in row if c.tag in ("td", "th")]
        if any(cells):
            rows.append(indent + "| " + " | ".join(cells) + " |")
    if rows and max(map(len, rows)) < 400:
        out.append("\n".join(rows))


def _blocks(node: etree._Element, indent: str, out: list[str]) -> None:
    """Appends the paragraphs of ``node`` to ``out``, each already wrapped."""
    loose = [node.text or ""]

    def flush(bullet: str = "") -> None:
        text = BREAKS.sub(" ", "".join(loose)).strip()
        if text:
            out.append(wrap(text, indent))
        loose.clear()

    number = 0
    for child in node:
        tail = child.tail or ""
        tag = child.tag
        if tag not in BLOCKS or _skip(child):
            loose.append(_inline(child) + tail)
            continue
        flush()
        if tag == "pre":
            code = "".join(child.itertext()).expandtabs(8).strip("\n")
            if code.strip() and len(code) < 6000:
                out.append("\n".join((indent + "   " + s).rstrip() for s in code.split("\n")))
        elif tag in UNDERLINES:
            title = BREAKS.sub(" ", _inline(child)).strip(" ¶#§\n")
            if title:
                out.append(f"\n{title}\n{UNDERLINES[tag] * len(title)}")
        elif tag == "li":
            number += 1
            lead = f"{number}. " if node.tag == "ol" else "* "
            inner: list[str] = []
            _blocks(child, indent + " " * len(lead), inner)
            if inner:
                inner[0] = indent + lead + inner[0].lstrip()
                out.extend(inner)
        elif tag in ("dd", "blockquote"):
            _blocks(child, indent + "   ", out)
        elif tag == "dt":
            text = BREAKS.sub(" ", "".join(child.itertext())).replace("¶", "").strip()
            if text and len(text) < 600:
                out.append(wrap(text, indent + "   ", indent))
        elif tag == "table":
            _table(child, indent, out)
        else:
            _blocks(child, indent, out)
        loose.append(tail)
    flush()


def html_text(source: bytes | str) -> str:
    """The main part of an HTML page as wrapped text."""
    if not source.strip():
        return ""
    try:
        if isinstance(source, bytes):
            source = source.decode("utf-8", "replace")
        root = lxml_html.document_fromstring(re.sub(r"^<\?xml[^>]*\?>", "", source))
    except (etree.ParserError, ValueError):
        return ""
    found = root.xpath("//div[@role='main']|//main|//div[@class='body']|//article|//body")
    if not found:
        return ""
    out: list[str] = []
    # The first match in document order may be the whole body: prefer the most specific kind.
    ranked = sorted(found, key=lambda n: (n.tag == "body", n.tag == "main"))
    _blocks(ranked[0], "", out)
    return "\n\n".join(out)


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


def _fragment(markup: str, indent: str = "") -> str:
    """Cheap rendering of the short HTML of service models: no tree is built."""
    markup = re.sub(r"</?(?:code|tt)>", '"', markup)
    markup = re.sub(r"</?(?:i|em)>", "*", re.sub(r"</?(?:b|strong)>", "**", markup))
    out = []
    for part in SPLIT.split(markup):
        for item in part.split("<li>"):
            text = html.unescape(TAGS.sub("", item))
            text = " ".join(text.split())
            if len(text) > 1:
                out.append(
                    wrap(
                        text,
                        indent + ("  " if "<li>" in part else ""),
                        indent + "* " if "<li>" in part else None,
                    )
                )
    return "\n\n".join(out)


def service_model(path: Path) -> str:
    """Prose of a botocore service model (``service-2.json`` or its gzip)."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    model = json.loads(raw)
    parts = [_fragment(model.get("documentation") or "")]
    for name, operation in model.get("operations", {}).items():
        parts += [name, _fragment(operation.get("documentation") or "", "   ")]
    for name, shape in model.get("shapes", {}).items():
        body = [_fragment(shape.get("documentation") or "", "   ")]
        for member, spec in (shape.get("members") or {}).items():
            if isinstance(spec, dict) and spec.get("documentation"):
                body.append(f"   {member}\n" + _fragment(spec["documentation"], "      "))
        if any(body):
            parts += [f"class {name}", *body]
    return "\n\n".join(filter(None, parts))


def discovery(path: Path) -> str:
    """Descriptions in a Google API discovery document."""
    parts: list[str] = []

    def walk(node: object, name: str, depth: int) -> None:
        if not isinstance(node, dict):
            return
        text = node.get("description")
        if isinstance(text, str) and len(text) > 40:
            pad = "   " * min(depth, 3)
            parts.append(f"{pad}{name}\n" + wrap(_markup(text), pad + "   "))
        for key, value in node.items():
            walk(value, key, depth + (key not in ("properties", "parameters", "methods")))

    document = json.loads(path.read_bytes())
    for key in ("resources", "schemas"):
        walk(document.get(key), key, -1)
    return "\n\n".join(parts)


def rst_text(path: Path) -> str:
    """reStructuredText or Markdown with roles and literals rewritten."""
    return _markup(path.read_text("utf-8", "replace"))


POD = re.compile(r"([BCIFLSEXZ])<+\s?([^<>]*?)\s?>+")


def pod_text(path: Path) -> str:
    """A perl pod: paragraphs wrapped, inner sequences rewritten."""
    out: list[str] = []
    marks = {"B": '"', "C": '"', "F": '"', "I": "*"}
    for block in re.split(r"\n\s*\n", path.read_text("utf-8", "replace")):
        if block.startswith("=head"):
            title = block.split(" ", 1)[-1].strip()
            out.append(f"\n{title}\n{('*' if block[5] == '1' else '=') * len(title)}")
        elif block.startswith("=item"):
            out.append("* " + POD.sub(r"\2", block[5:]).strip())
        elif block.startswith("="):
            continue
        elif block.startswith((" ", "\t")):
            out.append("\n".join("   " + s.strip("\n") for s in block.expandtabs().split("\n")))
        else:

            def mark(m: re.Match[str]) -> str:
                sign = marks.get(m[1], "")
                return sign + m[2].split("|")[0] + sign

            out.append(wrap(POD.sub(mark, POD.sub(mark, " ".join(block.split())))))
    return "\n\n".join(out)


def read_html(path: Path) -> str:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return html_text(raw) if len(raw) < 3_000_000 else ""


READERS = {
    "html": read_html,
    "docstrings": python_docs,
    "code": source_code,
    "rst": rst_text,
    "service": service_model,
    "discovery": discovery,
    "pod": pod_text,
}
