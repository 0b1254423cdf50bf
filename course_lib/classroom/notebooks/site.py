"""The chapters as a web site: one page for each notebook, and a first page that lists them.

The pages need no server and no kernel. Formulas are drawn by MathJax, which the reader's browser fetches
from the web; without it they show as TeX. Nothing else is loaded from outside.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path

from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from nbformat import NotebookNode

_TEMPLATE = """{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{% if resources.formulas %}{{ super() }}{% endif %}{%- endblock -%}
"""
_INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training with many GPUs</title>
<style>
body {{ font: 16px/1.55 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; color:
#222; }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .2rem; }} a {{ color: #0b57d0; }} p {{ margin: .2rem 0; }}
.failed {{ color: #b3261e; }} </style></head><body> <h1>Training with many GPUs</h1> <p>Each page is one
chapter with the outputs of a real run. <code>make lab</code> opens them for you to run.</p> {entries}
</body></html>
"""


@dataclass(frozen=True)
class Page:
    """One entry of the index: the page's file name, the chapter's title, its first paragraph (Markdown).

    failure: why this chapter's run stopped; None when it did not.
    """

    file: str
    title: str
    summary: str
    failure: str | None = None


def title_and_summary(notebook: NotebookNode, fallback: str) -> tuple[str, str]:
    """The text of the first Markdown heading, and the first paragraph after it ("" when there is none)."""
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    heading = re.search(r"^#+\s+(.+?)\s*#*$", text, flags=re.MULTILINE)
    if heading is None:
        return fallback, ""
    blocks = re.split(r"\n\s*\n", text[heading.end() :])
    prose = (block.strip() for block in blocks)
    first = next((block for block in prose if block and not re.match(r"[#<!|>`\-*]|\$\$", block)), "")
    return heading.group(1), first


def write_page(notebook: NotebookNode, name: str, out: Path, failure: str | None = None) -> Page:
    """Write `out/name.html`; links to other chapters' notebooks lead to their pages."""
    formulas = any("$" in cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    exporter = HTMLExporter(raw_template=_TEMPLATE, embed_images=True)
    resources = {"metadata": {"name": name}, "formulas": formulas}
    body, _ = exporter.from_notebook_node(notebook, resources=resources)
    body = re.sub(r'(href="[^":]+)\.ipynb(["#])', r"\1.html\2", body)
    (out / f"{name}.html").write_text(body, encoding="utf-8")
    return Page(f"{name}.html", *title_and_summary(notebook, name), failure)


def write_index(pages: list[Page], out: Path) -> Path:
    """Write `out/index.html`, which lists the pages in the order given; return its path."""
    index = out / "index.html"
    index.write_text(_INDEX.format(entries="\n".join(_entry(page) for page in pages)), encoding="utf-8")
    return index


def _entry(page: Page) -> str:
    title = markdown2html(page.title).replace("<p>", "").replace("</p>", "").strip()
    entry = f'<h2><a href="{html.escape(page.file)}">{title}</a></h2>\n{markdown2html(page.summary)}'
    if page.failure:
        entry += f'<p class="failed">This run stopped: {html.escape(page.failure.splitlines()[0])}</p>'
    return entry
