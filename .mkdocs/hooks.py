"""Hooks of the documentation site: add pages of the root and a page of all flags, and rewrite links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
AT_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
PROGRAMS = ("pretrain_gpt.py", "tools/post_train.py", "tools/generate.py", "tools/evaluate.py")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, and a page with the flags of all programs."""
    for name, page in AT_THE_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    parts = ["# Flags\n\nThe output of `--help-all` of each program."]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    for program in PROGRAMS:
        command = [sys.executable, str(ROOT / program), "--help-all"]
        shown = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, check=True).stdout
        parts.append(f"## {program}\n\n```text\n{shown}```")
    files.append(File.generated(config, "flags.md", content="\n\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to pages for the site; replace a link to any other file of the repository by its text."""
    at_the_root = page.file.src_path in AT_THE_ROOT.values()
    folder = ROOT if at_the_root else (ROOT / "docs" / page.file.src_path).parent
    here = os.path.dirname(page.file.src_path)

    def on_the_site(link: re.Match[str]) -> str:
        bang, text, target, heading = link.groups()
        path = (folder / target).resolve()
        if target.startswith("http") or not path.is_relative_to(ROOT):
            return link[0]
        name = str(path.relative_to(ROOT))
        if name in AT_THE_ROOT or name.startswith("docs/"):
            on_site = os.path.relpath(AT_THE_ROOT.get(name, name.removeprefix("docs/")), here or ".")
            return f"{bang}[{text}]({on_site}{heading or ''})"
        return text if path.exists() else link[0]

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)", on_the_site, markdown)
