"""Hooks of mkdocs: they add files from outside docs/ to the site, as pages.

Links in Markdown files are relative to the repository. On the site, links that lead out of docs/ lead to these pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.md",
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "examples/README.md": "examples/index.md",
}
"""Pages of the site, by the path of their file in the repository."""
_FOLDERS = (("examples/**/*.py", "py.md"), ("benchmarks/results/*.md", "md"), ("benchmarks/results/*.png", "png"))
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """Return the pages made from files outside docs/, by the path of the file in the repository."""
    found = dict(PAGES)
    for pattern, suffix in _FOLDERS:
        for file in sorted(ROOT.glob(pattern)):
            found[file.relative_to(ROOT).as_posix()] = f"{file.relative_to(ROOT).with_suffix('').as_posix()}.{suffix}"
    return found


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for source, target in pages().items():
        if target == "index.md":
            continue
        if target.endswith(".md"):
            files.append(File.generated(config, target, content=_render_page(source)))
        else:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page to lead to pages of the site."""
    target = page.file.src_uri
    source = next((file for file, page_uri in pages().items() if page_uri == target != "index.md"), f"docs/{target}")
    return with_links(markdown, source, target)


def with_links(markdown: str, source: str, target: str) -> str:
    """Rewrite the links of `markdown`, the text of the file `source`, for the page `target` of the site."""
    last, parts = 0, []
    for block in _FENCE.finditer(markdown):
        parts += [_rewrite_links(markdown[last : block.start()], source, target), block[0]]
        last = block.end()
    return "".join([*parts, _rewrite_links(markdown[last:], source, target)])


def _rewrite_links(text: str, source: str, target: str) -> str:
    return _LINK.sub(lambda link: f"{link[1]}{_resolve_link(link[2], source, target)}{link[3] or ''}{link[4]}", text)


def _resolve_link(link: str, source: str, target: str) -> str:
    if ":" in link:
        return link
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    is_docs_page = file.startswith("docs/") and not file.endswith(".py")
    page = file.removeprefix("docs/") if is_docs_page else pages().get(file)
    if page is None:
        raise ValueError(f"{source} links to {link}, which is no page of the site: see {__file__}")
    return posixpath.relpath(page, posixpath.dirname(target) or ".")


def _render_page(source: str) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".py"):
        return f"# {Path(source).name}\n\n```python\n{text}```\n"
    return text if source.endswith(".md") else f"# {Path(source).name.capitalize()}\n\n```text\n{text}```\n"
