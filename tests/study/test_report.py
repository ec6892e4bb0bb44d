"""What a study writes: results for programs, a policy to train with, a report that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from castwise.errors import StudyError
from castwise.policy import Policy
from castwise.study import read_results, study
from castwise.study.report import html_of
from castwise.study.table import table

TASK = f"{Path(__file__).parent / 'known' / 'healthy.py'}:Regression"
STEPS, EVERY, SEEDS = 32, 16, 2


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    study(TASK, precisions=["fp16", "bf16"], steps=STEPS, seeds=SEEDS, out=folder)
    return folder


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, Any]:
    return read_results(out)


class _Page(HTMLParser):
    """Every attribute that can load something, and the tags that are left open."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [value or "" for key, value in attrs if key in ("src", "srcset", "href", "data", "poster")]
        if tag not in ("meta", "img", "source", "br", "link", "input", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_results_have_the_fields_of_schema_version_1(results: dict[str, Any]) -> None:
    assert results["schema_version"] == 1
    assert results["task"] == TASK
    assert results["device"]
    assert list(results["arms"]) == ["fp32", "fp16", "bf16"]
    for arm in results["arms"].values():
        assert len(arm["final_metric"]) == len(arm["skipped_steps"]) == SEEDS
        for series in ("loss", "validation", "grad_norm"):
            assert [len(run) for run in arm[series]] == [STEPS // EVERY] * SEEDS
            assert all(isinstance(value, float) for run in arm[series] for value in run)
        assert [len(run) for run in arm["step_grad_norm"]] == [STEPS] * SEEDS
        assert arm["throughput"] > 0
        assert isinstance(arm["emulated"], bool)
    verdict = results["verdict"]
    assert verdict["recommended"] in results["arms"]
    assert set(verdict["status"].values()) == {"cannot tell"}  # two seeds, 32 steps
    assert verdict["detectable_difference"] > 0
    assert any("too few seeds" in reason for reason in verdict["reasons"])
    assert any("32 steps are too few" in reason for reason in verdict["reasons"])


def test_arms_start_from_the_same_weights(results: dict[str, Any]) -> None:
    starts = [arm["initial_metric"] for arm in results["arms"].values()]
    assert starts[0][0] != starts[0][1]  # seeds differ
    for start in starts[1:]:
        assert start == pytest.approx(starts[0], rel=0.05)  # arms differ by rounding alone


def test_results_of_another_version_are_refused(tmp_path: Path, results: dict[str, Any]) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results | {"schema_version": 99}), encoding="utf-8")
    with pytest.raises(StudyError, match="schema_version 99"):
        read_results(tmp_path)


def test_the_policies_beside_the_report_are_those_of_the_arms(out: Path, results: dict[str, Any]) -> None:
    chosen = results["verdict"]["recommended"]
    assert Policy.load(out / "policy.toml") == Policy.from_toml(results["arms"][chosen]["policy"])
    for name, arm in results["arms"].items():
        assert Policy.load(out / "policies" / f"{name}.toml") == Policy.from_toml(arm["policy"])


def test_the_report_loads_nothing_and_closes_every_tag(out: Path) -> None:
    text = (out / "report.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert len(page.loads) >= 10
    assert all(load.startswith("data:image/svg+xml;base64,") for load in page.loads)
    assert not page.tags & {"script", "link", "iframe", "object", "embed"}
    assert not re.search(r"https?:|@import|url\(", text)


def test_the_report_is_made_from_the_results_file_alone(out: Path, results: dict[str, Any]) -> None:
    written = (out / "report.html").read_text(encoding="utf-8")
    again = html_of(results)
    without_images = re.compile(r'"data:[^"]*"')
    assert without_images.sub("", again) == without_images.sub("", written)


def test_report_and_table_give_the_verdict_and_its_limits_in_words(out: Path, results: dict[str, Any]) -> None:
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "This study cannot tell whether fp16 and bf16 are safe." in text
    assert "What this study could not have seen" in text
    for said in (text, table(results)):
        assert all(name in said for name in ("fp32", "fp16", "bf16", "cannot tell"))


def test_what_the_user_wrote_is_escaped(results: dict[str, Any]) -> None:
    hostile = results | {"task_details": results["task_details"] | {"description": "<script>alert(1)</script>"}}
    assert "<script>" not in html_of(hostile)
