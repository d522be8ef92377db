"""What mkdocs does for this site beyond its own: pages of files that lie elsewhere.

Links and pictures are written as they are right in the repository. Those that lead out of docs/ lead, on the site, to
pages made of these files.
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
"""Files of the repository, and what they are on the site."""
_FOLDERS = (("examples/**/*.py", "py.md"), ("benchmarks/results/*.md", "md"), ("benchmarks/results/*.png", "png"))
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """Files outside docs/ that the site shows, by their places in the repository."""
    found = dict(PAGES)
    for pattern, ending in _FOLDERS:
        for file in sorted(ROOT.glob(pattern)):
            found[file.relative_to(ROOT).as_posix()] = f"{file.relative_to(ROOT).with_suffix('').as_posix()}.{ending}"
    return found


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for source, target in pages().items():
        if target == "index.md":
            continue
        if target.endswith(".md"):
            files.append(File.generated(config, target, content=_as_page(source)))
        else:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links that lead to pages of the site."""
    target = page.file.src_uri
    source = next((it for it, made in pages().items() if made == target != "index.md"), f"docs/{target}")
    return with_links(markdown, source, target)


def with_links(markdown: str, source: str, target: str) -> str:
    """`markdown`, which is the file `source` of the repository, as the page `target` of the site."""
    code, last, parts = _FENCE.finditer(markdown), 0, []
    for block in code:
        parts += [_linked(markdown[last : block.start()], source, target), block[0]]
        last = block.end()
    return "".join([*parts, _linked(markdown[last:], source, target)])


def _linked(text: str, source: str, target: str) -> str:
    return _LINK.sub(lambda link: f"{link[1]}{_on_site(link[2], source, target)}{link[3] or ''}{link[4]}", text)


def _on_site(link: str, source: str, target: str) -> str:
    if ":" in link:
        return link
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    inside = file.startswith("docs/") and not file.endswith(".py")
    shown = file.removeprefix("docs/") if inside else pages().get(file)
    if shown is None:
        raise ValueError(f"{source} links to {link}, which is no page of the site: see {__file__}")
    return posixpath.relpath(shown, posixpath.dirname(target) or ".")


def _as_page(source: str) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".py"):
        return f"# {Path(source).name}\n\n```python\n{text}```\n"
    return text if source.endswith(".md") else f"# {Path(source).name.capitalize()}\n\n```text\n{text}```\n"
