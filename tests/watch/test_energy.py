"""Energy counters: read as the kernel and the driver write them, through their turns, and absent where they are not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from castwise.watch.energy import NvmlMeter, RaplMeter, meters_for


def zone(root: Path, name: str, microjoules: int, limit: int = 1000) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "max_energy_range_uj").write_text(f"{limit}\n")
    (root / name / "energy_uj").write_text(f"{microjoules}\n")
    return root / name / "energy_uj"


def test_packages_add_up_and_their_parts_do_not_count_twice(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", 100), zone(tmp_path, "intel-rapl:1", 50)
    core = zone(tmp_path, "intel-rapl:0:0", 10)
    meter = RaplMeter(tmp_path)
    assert meter.joules() == 0.0
    for file, value in ((first, 400), (second, 60), (core, 300)):
        file.write_text(f"{value}\n")
    assert meter.joules() == pytest.approx(310e-6)


def test_a_counter_that_starts_anew_is_followed(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", 900)
    meter = RaplMeter(tmp_path)
    for value in (950, 30, 80):
        file.write_text(str(value))
        spent = meter.joules()
    assert spent == pytest.approx(180e-6)


def test_a_gpus_millijoules_are_joules_since_the_start() -> None:
    counter = iter([5_000, 5_250, 7_500])
    meter = NvmlMeter(lambda: next(counter))
    assert [meter.joules(), meter.joules()] == [0.25, 2.5]


def test_what_a_machine_does_not_report_is_absent_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "castwise.watch.energy"):
        assert meters_for("GPU-00000000-0000-0000-0000-000000000000", tmp_path) == []
    said = " ".join(caplog.messages)
    assert "the CPU's energy is not logged" in said and "the GPU's energy is not logged" in said


def test_a_counter_that_only_root_may_read_is_absent_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone(tmp_path, "intel-rapl:0", 900)
    read = Path.read_text

    def refuse(self: Path, *args: str) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(self))
        return read(self, *args)

    monkeypatch.setattr(Path, "read_text", refuse)
    with caplog.at_level(logging.INFO, "castwise.watch.energy"):
        assert meters_for(None, tmp_path) == []
    assert "Permission denied" in caplog.text
