"""Files that are replaced whole."""

from __future__ import annotations

from pathlib import Path

from mlxpaged.durable_files import replacing


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    file, link = tmp_path / "dotfiles/keys.json", tmp_path / "keys.json"
    file.write_text("old")
    link.symlink_to(file)
    with replacing(link) as new:
        new.write(b"new")
    assert link.is_symlink()
    assert file.read_text() == "new"
