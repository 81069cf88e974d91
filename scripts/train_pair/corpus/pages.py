"""The main part of HTML pages as plain text, in the layout of ``layout.py``.

Literals are in double quotes, emphasis between asterisks, nested blocks are indented by three spaces.
"""

import gzip
import re
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.train_pair.corpus.layout import titled, wrap

if TYPE_CHECKING:
    from lxml import etree

SKIPPED = {
    "script", "style", "head", "nav", "footer", "aside", "svg", "form", "button", "header", "noscript",
    "iframe", "input", "select", "math", "template",
}  # fmt: skip
SKIPPED_CLASSES = {
    "sphinxsidebar", "related", "footer", "headerlink", "sidebar", "navigation", "breadcrumb",
    "toctree-wrapper", "rustdoc-breadcrumbs", "src", "nav", "lineno", "linenos", "copybtn", "navheader",
    "navfooter", "toc", "bottomnav", "topnav",
}  # fmt: skip
LITERAL = {"code", "tt", "kbd", "samp", "var"}
BLOCKS = {
    "p", "div", "section", "article", "main", "ul", "ol", "dl", "dt", "dd", "li", "pre", "table",
    "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "tr", "td", "th", "tbody", "thead", "tfoot", "body",
    "details", "summary", "figure", "hr", "center", "fieldset", "caption", "colgroup",
}  # fmt: skip
UNDERLINES = {"h1": "*", "h2": "=", "h3": "-", "h4": "~", "h5": "~", "h6": "~"}
BREAKS = re.compile(r"\s*\n\s*")


def _skip(node: "etree._Element") -> bool:
    if not isinstance(node.tag, str) or node.tag in SKIPPED:
        return True
    if not SKIPPED_CLASSES.isdisjoint((node.get("class") or "").split()):
        return True
    return node.get("role") in ("navigation", "search") or node.get("id") in ("sidebar", "toc")


def _inline(node: "etree._Element", literal: bool = False) -> str:
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


def _table(node: "etree._Element", indent: str, out: list[str]) -> None:
    rows = []
    for row in node.iter("tr"):
        cells = [BREAKS.sub(" ", _inline(c)).strip() for c in row if c.tag in ("td", "th")]
        if any(cells):
            rows.append(indent + "| " + " | ".join(cells) + " |")
    if rows and max(map(len, rows)) < 400:
        out.append("\n".join(rows))


def _blocks(node: "etree._Element", indent: str, out: list[str]) -> None:
    """Appends the paragraphs of ``node`` to ``out``, each already wrapped."""
    loose = [node.text or ""]

    def flush() -> None:
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
                out.append(titled(title, UNDERLINES[tag]))
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
    try:
        from lxml import etree
        from lxml import html as lxml_html
    except ImportError:
        raise SystemExit("HTML pages need lxml, which is missing; pip install '.[train]'") from None
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


def unpacked(path: Path) -> bytes:
    """A file's content, which may be compressed."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def read_html(path: Path) -> str:
    raw = unpacked(path)
    return html_text(raw) if len(raw) < 3_000_000 else ""
