"""Records of a run: whole lines also when it is killed, read as they grow, shown in a terminal and on a page."""

from __future__ import annotations

import functools
import html
import html.parser
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise.cli import main
from castwise.errors import CastwiseError
from castwise.watch import Event, JsonlSink, Run, TensorBoardSink, numbers, read_jsonl, sink_for, sparkline, terminal
from castwise.watch import page as html_page

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def log_of(tmp_path: Path, steps: int = 30) -> Path:
    sink = JsonlSink(tmp_path / "run.jsonl")
    for step in range(steps):
        sink.write({"step": step, "time": 0.0, "train/loss": 2.0 / (step + 1), "train/loss_scale": 65536.0})
    sink.write({"step": 7, "train/loss": math.nan})
    sink.write(Event(7, "finding", "range too small: <mul> in a.b", {"layer": "a.b"}).to_dict())
    sink.write(Event(7, "raise", "layer a.b computes in float32").to_dict())
    sink.close()
    return sink.path


@given(st.lists(st.dictionaries(st.text(min_size=1).filter(lambda k: k not in ("step", "event")), FLOATS), max_size=5))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    sink = JsonlSink(path)
    written = [{"step": place, **record} for place, record in enumerate(records)]
    for record in written:
        sink.write(record)
    sink.close()
    assert repr(read_jsonl(path)[0]) == repr(written)


def test_every_line_is_json_that_other_tools_can_read(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise ValueError(word)

    for line in log_of(tmp_path).read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a"')
    records, offset = read_jsonl(path)
    assert [r["step"] for r in records] == [1]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert read_jsonl(path, offset)[0] == [{"step": 2, "a": 2}]


@pytest.mark.parametrize(
    "text,match",
    [
        ("nonsense\n", "line 1 is not JSON"),
        ('{"a": 1}\n', "no step"),
        ("[1, 2]\n", "no step"),
        ('{"step": "first", "a": 1}\n', "its step is 'first'"),
        ('{"step": NaN, "a": 1}\n', "its step is nan"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(CastwiseError, match=match):
        read_jsonl(tmp_path / "x.jsonl")


def test_a_function_a_writer_a_path_and_a_sink_all_take_records(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen.append((name, value, step))

        def add_text(self, name: str, text: str, step: int) -> None:
            self.seen.append((name, text, step))

    seen: list[Any] = []
    writer = Writer()
    for target in (seen.append, writer, tmp_path / "a.jsonl", JsonlSink(tmp_path / "b.jsonl")):
        sink_for(target).write({"step": 3, "train/loss": 0.5})
        sink_for(target).write(Event(3, "raise", "why").to_dict())
    assert len(seen) == 2 and numbers(seen[0]) == {"train/loss": 0.5}
    assert writer.seen == [("train/loss", 0.5, 3), ("castwise/raise", "why", 3)]
    assert len(read_jsonl(tmp_path / "a.jsonl")[0]) == len(read_jsonl(tmp_path / "b.jsonl")[0]) == 2
    for nonsense in (3, None):
        with pytest.raises(CastwiseError):
            sink_for(nonsense)
    with pytest.raises(CastwiseError, match="add_scalar"):
        TensorBoardSink(3)


@given(st.lists(FLOATS, max_size=200), st.integers(1, 60))
def test_a_sparkline_is_never_wider_than_asked_and_marks_what_is_not_finite(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert ("×" in line) >= any(not math.isfinite(v) for v in values)


def test_the_terminal_shows_metrics_and_events_within_its_width(tmp_path: Path) -> None:
    run = Run()
    run.add(read_jsonl(log_of(tmp_path))[0])
    text = terminal.render(run, width=60)
    assert "train/loss" in text and "finding" in text and "raise" in text
    assert all(len(line) <= 60 for line in text.splitlines())
    assert "nothing" in terminal.render(Run())


def large_run(layers: int = 200) -> Run:
    """What a model of many layers logs, with paths as long as they get."""
    run = Run()
    names = [f"model.decoder.layers.{i}.self_attention.output_projection" for i in range(layers)]
    for step in range(0, 50, 10):
        of_layers = {f"grad_norm/{name}": float(i + step) for i, name in enumerate(names)}
        run.add([{"step": step, "train/loss": 1.0 / (step + 1), "train/grad_norm": 1.0, **of_layers}])
    return run


def test_many_layers_are_told_by_their_largest_in_the_terminal_and_folded_on_the_page() -> None:
    run = large_run()
    text = terminal.render(run, width=72)
    assert all(len(line) <= 72 for line in text.splitlines()) and len(text.splitlines()) < 12
    assert "239" in text and "197 more" in text, "the largest newest value, and what is left out"
    assert "grad_norm/…" in text and all(f"{i}.self_attention.output_projection" in text for i in (199, 198, 197))
    page = html_page.render(run)
    assert page.count("<figure>") == 2 and page.count("<details>") == 1 and "(200)" in page
    assert len(page) < 100_000


def test_trends_that_the_run_told_of_itself_are_not_told_twice() -> None:
    run = Run()
    run.add({"step": step, "train/loss": 2.0**step} for step in range(60))
    assert [cause for cause, _ in run.advice()] == ["learning rate"]
    run.add([Event(59, "advice", "lower it", {"cause": "learning rate"}).to_dict()])
    assert run.advice() == []


def follow(monkeypatch: pytest.MonkeyPatch, log: Path, *between: Callable[[], object]) -> int:
    """Follow a file that something happens to between two looks, until interrupted."""
    happens = iter(between)

    def sleep(_seconds: float) -> None:
        do = next(happens, None)
        if do is None:
            raise KeyboardInterrupt
        do()

    monkeypatch.setattr("time.sleep", sleep)
    return main(["watch", str(log), "--follow"])


def test_a_run_is_followed_as_it_grows_from_before_it_begins_and_when_it_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.jsonl"
    first, second, anew = (f'{{"step": {step}, "train/loss": 0.5}}\n' for step in (1234, 2345, 7))
    contents = (first, first + second, anew)
    follow(monkeypatch, log, *(functools.partial(log.write_text, text) for text in contents))
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith(("nothing", "step"))] == [
        "nothing has been logged yet",
        "step 1,234",
        "step 2,345",
        "step 7",
    ]


def test_the_page_fits_a_phone(tmp_path: Path) -> None:
    """Nothing is wider than 390 pixels, in a browser that lays the page out."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium to lay the page out")
    run = large_run(20)
    run.add([Event(7, "finding", "range too small: " + "x" * 300, {"layer": "a" * 200}).to_dict()])
    content = html_page.render(run).replace("<details>", "<details open>")
    # In a frame, as browsers on a desk make no window this narrow.
    page = tmp_path / "frame.html"
    page.write_text(
        f'<title></title><iframe width="390" height="800" srcdoc="{html.escape(content)}" onload="'
        'document.title=this.contentDocument.documentElement.scrollWidth"></iframe>'
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(page)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    width = re.search(r"<title>(\d+)</title>", out)
    assert width is not None and 300 < int(width[1]) <= 394, "390 pixels and the frame's border"


class Checker(html.parser.HTMLParser):
    """Open tags and what is asked of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "path", "circle", "br"):
            self.stack.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return None

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def test_the_page_is_whole_escaped_and_loads_nothing(tmp_path: Path) -> None:
    run = Run()
    run.add(read_jsonl(log_of(tmp_path))[0])
    text = html_page.render(run, "my <run>")
    checker = Checker()
    checker.feed(text)
    assert checker.stack == [] and checker.loads == []
    assert "&lt;mul&gt;" in text and "my &lt;run&gt;" in text and "width=device-width" in text
    assert "<circle" in text, "a value that is not finite is marked"


def test_the_command_shows_a_run_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of(tmp_path)
    assert main(["watch", str(log)]) == 0
    assert "train/loss_scale" in capsys.readouterr().out
    assert main(["watch", str(log), "--html", str(tmp_path / "run.html")]) == 0
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    assert main(["watch", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err
