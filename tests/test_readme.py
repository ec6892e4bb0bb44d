"""The README is true: its Python runs as it stands, its policy file loads, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from castwise import Policy
from castwise.cli import COMMANDS
from castwise.presets import PRESETS
from castwise.study import study

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", blocks(README, "python"), ids=lambda code: code.splitlines()[-1][:40])
def test_python_of_the_readme_runs_as_it_stands(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    for promised in re.findall(r"# -> (.+)$", code, re.MULTILINE):
        assert promised.removesuffix(" ...") in printed


def test_the_task_of_the_readme_can_be_studied(tmp_path: Path) -> None:
    (code,) = (code for code in blocks(README, "python") if code.startswith("# train.py"))
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    name = f"{tmp_path / 'train.py'}:Ripples"
    results = study(name, precisions=["bf16"], steps=4, seeds=1, out=tmp_path / "out", report=False)
    assert set(results["arms"]) == {"fp32", "bf16"}


def test_the_policy_file_of_the_readme_loads() -> None:
    (text,) = blocks(README, "toml")
    policy = Policy.from_toml(text)
    assert policy.layers[0].match == "decoder.**.ffn"


def test_the_table_of_presets_is_complete_and_right_about_scaling() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\w ]+) \|$", README, re.MULTILINE))
    assert set(rows) == set(PRESETS)
    for name, scaled in rows.items():
        if name != "auto":
            assert Policy.preset(name).uses_scaling == (scaled == "yes")


def test_every_command_that_the_readme_shows_exists() -> None:
    shown = set(re.findall(r"^castwise (\w+)", "\n".join(blocks(README, "sh")), re.MULTILINE))
    assert shown == set(COMMANDS)


def test_the_chinese_readme_shows_the_same_code() -> None:
    def code(text: str) -> list[list[str]]:
        found = blocks(text, "python") + blocks(text, "toml") + blocks(text, "sh")
        return [[re.sub(r"\s*#.*", "", line) for line in block.splitlines()] for block in found]

    assert code(CHINESE) == code(README)
    assert set(re.findall(r"^\| `(\w+)` \|", CHINESE, re.MULTILINE)) == set(PRESETS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target
