"""Output files are complete or unchanged, and are checked before the work."""

import argparse
import contextlib
import json
import os
import resource
import stat

import pytest

from kvindex_adapters.evaluate import output_files
from kvindex_adapters.evaluate.output_files import (
    PICTURES,
    check_output,
    output,
    replacing,
    write_json,
)


@contextlib.contextmanager
def bounded_files():
    """Limit files to 1,000 bytes, which has the effect of a full disk.

    This is no fixture, because pytest's own output may be a file, too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(path):
    with pytest.raises(OSError, match="pass a file in a folder that exists") as told:
        check_output("json", path)
    assert str(told.value).startswith(f"json: got {str(path)!r}, ")
    return str(told.value)


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
    assert "it is a folder" in refused(tmp_path)
    assert "its folder does not exist" in refused(tmp_path / "missing" / "a.json")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert "a link to a file that does not exist" in refused(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    assert "a device, a pipe or a socket" in refused(tmp_path / "pipe")
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "a.json")
    assert "File name too long" in refused(tmp_path / ("long" * 100))
    check_output("json", tmp_path / ("l" * 255))


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "/proc/a.json", "/proc/self/a.json"])
def test_devices_and_folders_of_the_system_are_refused(path, tmp_path):
    if not os.path.exists(os.path.dirname(path)):
        pytest.skip("no such folder on this system")
    refused(type(tmp_path)(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_or_a_file_without_permission_is_refused(tmp_path):
    (tmp_path / "old.json").touch(mode=0o444)
    assert "without write permission" in refused(tmp_path / "old.json")
    tmp_path.chmod(0o555)
    assert "Permission denied" in refused(tmp_path / "a.json")
    tmp_path.chmod(0o755)


def test_permissions_are_asked_of_the_system(tmp_path, monkeypatch):
    """This works also as root, for which the test above is skipped."""
    (tmp_path / "old.json").touch()
    monkeypatch.setattr(output_files.os, "access", lambda path, mode: False)
    assert "without write permission" in refused(tmp_path / "old.json")


def test_what_can_be_written_is_not_touched_by_the_check(tmp_path):
    old = tmp_path / "old.json"
    old.write_text("old")
    for path in (old, tmp_path / "new.json", None):
        check_output("json", path)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "old"


def test_a_picture_needs_an_ending_that_matplotlib_knows(tmp_path):
    check_output("plot", tmp_path / "a.PNG", endings=PICTURES)
    with pytest.raises(OSError, match=r"plot: got '.*a.json', .* does not end in .png or .pdf"):
        check_output("plot", tmp_path / "a.json", endings=PICTURES)


def test_a_file_is_replaced_with_its_mode_and_a_link_stays_one(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "real.json").chmod(0o640)
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o640
    assert len(list(tmp_path.iterdir())) == 2


def test_without_space_the_old_file_stays_and_the_error_is_in_words(tmp_path):
    out = tmp_path / "a.json"
    out.write_text("old")
    said = r"json: got '.*', which could not be written \(File too"
    with pytest.raises(OSError, match=said), bounded_files():
        write_json(out, "long" * 1000)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_what_fails_while_writing_leaves_the_old_file(tmp_path):
    out = tmp_path / "a.json"
    out.write_text("old")

    def interrupted():
        with replacing(out) as new:
            new.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(TypeError):
        write_json(out, {1, 2})
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_argparse_refuses_in_the_same_words(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=output())
    assert parser.parse_args(["--json", str(tmp_path / "a")]).json == tmp_path / "a"
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", "/nowhere/a.json"])
    assert (
        "argument --json: got '/nowhere/a.json', which cannot be written" in capsys.readouterr().err
    )
