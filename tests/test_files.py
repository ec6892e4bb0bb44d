"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from castwise._files import write_bytes, write_text


def test_text_is_written_as_utf8_with_its_line_ends_and_missing_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "report.txt"
    assert write_text(path, "größe\r\n混合精度\n") == path
    assert path.read_bytes() == "größe\r\n混合精度\n".encode()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = write_text(tmp_path / "results.json", "old")
    with pytest.raises(TypeError):
        write_bytes(path, "not bytes")  # type: ignore[arg-type]
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_text(folder, "a folder cannot be replaced by a file")
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["folder", "results.json"]


def test_a_reader_sees_the_old_file_or_the_new_one_never_a_part(tmp_path: Path) -> None:
    versions = [letter * 200_000 for letter in "ab"]
    path = write_text(tmp_path / "results.json", versions[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(20):
            write_text(path, versions[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert path.read_text() in versions
    writer.join()


@pytest.mark.skipif(os.name == "nt", reason="permissions and links are POSIX's here")
def test_permissions_and_links_stay(tmp_path: Path) -> None:
    new = write_text(tmp_path / "new.txt", "x")
    plain = tmp_path / "plain.txt"
    plain.touch()
    assert new.stat().st_mode == plain.stat().st_mode  # what open() would have given

    private = write_text(tmp_path / "private.txt", "x")
    private.chmod(0o600)
    link = tmp_path / "link.txt"
    link.symlink_to(private)
    write_text(link, "y")
    assert link.is_symlink()
    assert private.read_text() == "y"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
