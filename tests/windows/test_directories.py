"""`AtomicDir` on Windows: by two renames, because two directories cannot exchange their names there."""

from __future__ import annotations

import os

import pytest

from holdfast import AtomicDir
from holdfast.atomicdir import cleanup

DURABLE = {"durable": True, "not durable": False}


@pytest.fixture(params=DURABLE)
def site(request, tmp_path):
    return AtomicDir(tmp_path / "site", durable=DURABLE[request.param], timeout=60)


def write(site, text):
    with site.replace() as new:
        (new / "a").write_text(text)
        (new / "sub").mkdir()
        (new / "sub" / "b").write_text(text)


def content(site):
    with site.read() as there:
        return [(there / name).read_text() for name in ("a", "sub/b")]


def test_a_directory_is_replaced_as_a_whole(site, tmp_path):
    for text in ("first", "second", "third"):
        write(site, text)
        assert content(site) == [text, text]
    assert [name for name in os.listdir(tmp_path) if ".new-" in name or name.endswith(".tmp")] == []


def test_a_block_that_raises_changes_nothing(site, tmp_path):
    write(site, "first")
    with pytest.raises(FileNotFoundError), site.replace() as new:
        (new / "missing" / "a").write_text("second")
    assert content(site) == ["first", "first"]
    assert sorted(os.listdir(tmp_path)) == ["site", "site.versions"]


def test_an_edit_begins_with_a_copy(site):
    write(site, "first")
    with site.edit() as new:
        (new / "a").write_text("second")
    assert content(site) == ["second", "first"]


def test_kept_versions_can_be_brought_back(tmp_path):
    site = AtomicDir(tmp_path / "site", keep=2)
    for text in ("first", "second", "third"):
        write(site, text)
    site.rollback()
    assert content(site) == ["second", "second"]


def test_processes_take_turns(tmp_path, start_peer):
    peers = [start_peer(path=str(tmp_path / "site")) for _ in range(3)]
    for peer in peers:
        peer.do(
            "def work(times):\n"
            "    site = AtomicDir(path, timeout=100)\n"
            "    for _ in range(times):\n"
            "        with site.edit() as new:\n"
            "            file = new / 'counter'\n"
            "            file.write_text(str(int(file.read_text()) + 1 if file.exists() else 1))"
        )
    for peer in peers:
        peer.begin("work(5)")
    for peer in peers:
        peer.answer()
    with AtomicDir(tmp_path / "site").read() as there:
        assert (there / "counter").read_text() == "15"


def test_a_writer_that_was_killed_leaves_the_old_version(tmp_path, start_peer):
    site = AtomicDir(tmp_path / "site")
    write(site, "first")
    peer = start_peer(path=str(tmp_path / "site"))
    peer.do("block = AtomicDir(path).replace()")
    peer.do("new = block.__enter__()")
    peer.do("(new / 'a').write_text('half')")
    peer.kill()
    assert content(site) == ["first", "first"]
    write(site, "second")
    assert content(site) == ["second", "second"]
    assert [name for name in os.listdir(tmp_path) if ".new-" in name] == []


def test_files_that_may_not_be_written_are_replaced_and_removed(site, tmp_path):
    write(site, "first")
    with site.replace() as new:
        (new / "a").write_text("second")
        (new / "a").chmod(0o400)
    assert not os.access(tmp_path / "site" / "a", os.W_OK)
    write(site, "third")
    cleanup.remove(str(tmp_path / "site"))
    cleanup.remove(str(tmp_path / "site"))
    site.recover()
    assert os.listdir(tmp_path) == ["site.versions"]
