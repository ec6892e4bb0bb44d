"""Results and report of studies made up so that every kind of outcome is in them."""

from __future__ import annotations

import base64
import functools
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from castwise.errors import StudyError
from castwise.hardware import get_device
from castwise.policy import Policy
from castwise.study._drawing import DARK, LIGHT
from castwise.study.arms import Arm
from castwise.study.protocol import TaskSpec
from castwise.study.records import RunRecord
from castwise.study.report import html_of, write_report
from castwise.study.results import SCHEMA_VERSION, read_results, recommended_arm, results_of, write_results
from castwise.study.runner import Outcome, Settings
from castwise.study.table import table
from castwise.study.verdict import judge
from castwise.study.words import headline, limits, listed, number, rate

GOOD = [0.970, 0.972, 0.968, 0.971]
NEAR = [0.971, 0.971, 0.968, 0.970]
OutcomeOf = Callable[..., Outcome]


@pytest.fixture
def outcome_of(made: SimpleNamespace, spec_of: Callable[..., TaskSpec]) -> OutcomeOf:
    """A finished study from records by arm; the arms' policies follow from their names."""

    def build(
        *,
        device: str = "t4",
        cures: dict[str, str | None] | None = None,
        remedies: tuple[Arm, ...] = (),
        **runs: list[RunRecord],
    ) -> Outcome:
        arms = tuple(Arm(name, Policy.preset(name)) for name in runs if name in ("fp32", "fp16", "bf16"))
        spec = spec_of(name="faces", unit="points")
        settings = Settings(spec=spec, arms=arms, device=get_device(device), steps=400, seeds=len(runs["fp32"]))
        whole = {name: found for name, found in runs.items() if len(found) == settings.seeds}
        verdict = judge(spec, whole, steps=400)
        kept = {name: tuple(found) for name, found in runs.items()}
        return Outcome(settings, arms + remedies, kept, verdict, cures or {}, {"torch": "9.9", "threads": 1})

    return build


@pytest.fixture
def mixed(made: SimpleNamespace, outcome_of: OutcomeOf) -> dict[str, Any]:
    """fp16 broke down and is cured by a remedy, a first remedy failed early, bf16 is safe."""
    remedies = (
        Arm("fp16+norm-fp32", Policy.preset("float16"), "norm layers in fp32"),
        Arm("fp16+guilty-fp32", Policy.preset("float16"), "head in fp32"),
    )
    broken = [made.run("fp16", seed, [0.1, 0.3], skipped=[50] + [0] * 7, ended="boom at step 50") for seed in range(4)]
    runs = {
        "fp32": made.arm("fp32", GOOD),
        "fp16": broken,
        "bf16": made.arm("bf16", NEAR),
        "fp16+norm-fp32": broken[:1],
        "fp16+guilty-fp32": made.arm("fp16+guilty-fp32", GOOD),
    }
    return results_of(outcome_of(remedies=remedies, cures={"fp16": "fp16+guilty-fp32"}, **runs))


def test_results_hold_what_the_schema_names(mixed: dict[str, Any]) -> None:
    assert mixed["schema_version"] == SCHEMA_VERSION == 1
    assert (mixed["task"], mixed["device"]) == ("Stub", "NVIDIA T4")
    arm = mixed["arms"]["bf16"]
    assert arm["final_metric"] == NEAR
    assert [len(arm[key]) for key in ("loss", "validation", "grad_norm", "skipped_steps")] == [4] * 4
    assert {len(run) for key in ("loss", "validation", "metric", "grad_norm", "direction") for run in arm[key]} == {8}
    assert arm["throughput"] == pytest.approx(8 * 1600 / 4.0)
    assert arm["throughput_unit"] == "samples/s"
    assert arm["emulated"] is False
    assert arm["evaluated_at"] == [50, 100, 150, 200, 250, 300, 350, 400]
    verdict = mixed["verdict"]
    assert verdict["status"] == {"fp32": "safe", "fp16": "unsafe", "bf16": "safe", "fp16+guilty-fp32": "safe"}
    assert verdict["detectable_difference"] > 0
    assert all(isinstance(reason, str) for reason in verdict["reasons"])


def test_results_are_json_without_numbers_that_json_does_not_have(mixed: dict[str, Any]) -> None:
    assert json.loads(json.dumps(mixed, allow_nan=False)) == mixed
    assert mixed["arms"]["fp16"]["final_metric"] == [None] * 4
    assert mixed["arms"]["fp16"]["ended"][0] == {"failure": "scale stalled", "step": 50, "message": "boom at step 50"}


def test_what_is_recommended_is_the_arm_whose_policy_is_saved(made: SimpleNamespace, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(fp32=made.arm("fp32", GOOD), fp16=made.arm("fp16", GOOD), bf16=made.arm("bf16", GOOD))
    assert results_of(outcome)["verdict"]["recommended"] == recommended_arm(outcome).name == "fp16"
    assert recommended_arm(outcome).policy.low_format.name == "fp16"


def test_results_are_read_back_and_other_versions_refused(
    tmp_path: Path, made: SimpleNamespace, outcome_of: OutcomeOf
) -> None:
    outcome = outcome_of(fp32=made.arm("fp32", GOOD), bf16=made.arm("bf16", GOOD))
    written = write_results(outcome, tmp_path)
    assert read_results(tmp_path) == read_results(tmp_path / "results.json") == written
    (tmp_path / "results.json").write_text('{"schema_version": 99}')
    with pytest.raises(StudyError, match="schema_version 99"):
        read_results(tmp_path)
    with pytest.raises(StudyError, match="cannot be read"):
        read_results(tmp_path / "nowhere.json")


@functools.cache
def _html(text: str) -> str:
    return html_of(json.loads(text))


def html(results: dict[str, Any]) -> str:
    """The report, drawn once for all tests that look at the same results."""
    return _html(json.dumps(results))


class _Page(HTMLParser):
    """Tags and visible text of a page; complains about tags that are not closed."""

    VOID = frozenset({"meta", "img", "source", "br", "link"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def _images(page: _Page) -> list[str]:
    found = [attrs.get("src") or attrs.get("srcset") for tag, attrs in page.tags if tag in ("img", "source")]
    prefix = "data:image/svg+xml;base64,"
    assert all(url is not None and url.startswith(prefix) for url in found)
    return [base64.b64decode(str(url)[len(prefix) :]).decode() for url in found]


def test_the_report_needs_nothing_but_itself(mixed: dict[str, Any]) -> None:
    page = _Page(html(mixed))
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "iframe")]
    for _, attrs in page.tags:
        for key in ("src", "srcset", "href"):
            assert (attrs.get(key) or "data:").startswith("data:")
    assert "url(" not in html(mixed)
    for svg in _images(page):
        assert not re.findall(r'(?:href|src)="(?!#)[^"]*"', svg)


def test_every_figure_is_drawn_for_light_and_for_dark_and_described(mixed: dict[str, Any]) -> None:
    page = _Page(html(mixed))
    figures = [attrs for tag, attrs in page.tags if tag == "figure"]
    assert len(figures) >= 9
    assert len({attrs["id"] for attrs in figures}) == len(figures)
    sources = [attrs for tag, attrs in page.tags if tag == "source"]
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(sources) == len(images) == len(figures)
    assert {attrs["media"] for attrs in sources} == {"(prefers-color-scheme: dark)"}
    assert all(len(attrs["alt"] or "") > 20 for attrs in images)
    for svg in _images(page):
        ElementTree.fromstring(svg)
        assert "nan" not in svg.lower().replace("nano", "")


def test_no_colour_of_the_light_page_is_left_on_the_dark_one(mixed: dict[str, Any]) -> None:
    dark = [str(attrs["srcset"]) for tag, attrs in _Page(html(mixed)).tags if tag == "source"]
    for url in dark:
        svg = base64.b64decode(url.partition(",")[2]).decode()
        assert not [colour for colour in LIGHT.colours if colour in svg]
        assert set(re.findall(r"#[0-9a-f]{6}", svg)) <= {*DARK.colours, "#ffffff"}


def test_the_report_says_the_verdict_in_words_and_what_it_could_not_see(mixed: dict[str, Any]) -> None:
    text = " ".join(_Page(html(mixed)).text.split())
    for said in (
        "bf16 and fp16+guilty-fp32 train as well as fp32",
        "fp16 is unsafe",
        "boom at step 50",
        "fp16 becomes safe with head in fp32",
        "What this study could not have seen",
        "would have gone unnoticed",
        "not cured",
        "Recommended: fp16+guilty-fp32",
        "4 of 4 runs broke down",
        "NVIDIA H100 (SXM5) bf16",
    ):
        assert said in text, said


def test_the_same_results_give_the_same_report(mixed: dict[str, Any]) -> None:
    assert html_of(mixed) == html(mixed)


def test_names_are_escaped(mixed: dict[str, Any]) -> None:
    mixed["task_details"]["name"] = "<script>alert(1)</script>"
    assert "<script>" not in html_of(mixed)


def test_names_in_any_script_are_drawn_without_a_warning(mixed: dict[str, Any]) -> None:
    mixed["verdict"]["measures"][0]["name"] = "误差"
    assert "误差" in html_of(mixed)


def test_a_study_in_which_everything_went_wrong_still_has_a_report(
    tmp_path: Path, made: SimpleNamespace, outcome_of: OutcomeOf
) -> None:
    def broken(arm: str) -> list[RunRecord]:
        return [made.run(arm, 0, [math.nan, math.nan], skipped=[50] + [0] * 7, ended="nothing was finite")]

    results = results_of(outcome_of(fp32=broken("fp32"), fp16=broken("fp16")))
    text = _Page(write_report(results, tmp_path / "report.html").read_text()).text
    assert "cannot tell whether fp16 is safe" in text
    assert "no difference in accuracy can be told from luck" in text
    assert results["verdict"]["recommended"] == "fp32"
    assert "nothing was finite" in table(results)


def test_a_single_seed_has_a_report(made: SimpleNamespace, outcome_of: OutcomeOf) -> None:
    results = results_of(outcome_of(fp32=made.arm("fp32", GOOD[:1]), bf16=made.arm("bf16", GOOD[:1])))
    assert results["verdict"]["detectable_difference"] is None
    assert "too few seeds" in _Page(html(results)).text


def test_arms_that_equal_fp32_claim_no_detectable_difference(made: SimpleNamespace, outcome_of: OutcomeOf) -> None:
    results = results_of(outcome_of(fp32=made.arm("fp32", GOOD), bf16=made.arm("bf16", GOOD)))
    assert results["verdict"]["detectable_difference"] is None
    assert "gave the same accuracy as fp32's" in limits(results)[0]


def test_the_table_has_a_line_for_each_arm_and_ends_with_the_recommendation(mixed: dict[str, Any]) -> None:
    lines = table(mixed).splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()[:1] and line.split()[0] in mixed["arms"]}
    assert set(rows) == set(mixed["arms"])
    assert rows["fp16"].endswith("unsafe (4 of 4 runs failed)")
    assert rows["bf16"].endswith("safe")
    assert lines[-1].startswith("recommended: fp16+guilty-fp32")
    assert not re.search(r"\bnan\b|None", table(mixed))


def test_the_headline_and_limits_speak_of_what_is_there(mixed: dict[str, Any]) -> None:
    assert headline(mixed)[0].startswith("On faces, bf16 and fp16+guilty-fp32 train as well as fp32")
    assert not any("emulation" in said for said in limits(mixed))
    mixed["arms"]["bf16"]["emulated"] = True
    assert any(said.startswith("bf16 ran by emulation") for said in limits(mixed))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.988, "0.9880"),
        (3.2421, "3.242"),
        (0.00157, "0.0016"),
        (-0.5, "-0.5000"),
        (0.0, "0"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_numbers_are_short_and_of_even_width(value: float | None, said: str) -> None:
    assert number(value) == said


def test_rates_are_whole_from_a_hundred_up() -> None:
    assert (rate(4781.2), rate(12.34), rate(None)) == ("4,781", "12.34", "–")


def test_lists_read_like_english() -> None:
    assert [listed(list(names)) for names in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
