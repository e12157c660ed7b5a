"""The `sema` format: the bytes that we write, and what we read from anybody's bytes: a record, or CorruptLock."""

from __future__ import annotations

import json
import logging
from copy import copy
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import holdfast
from holdfast import CorruptLock, owner
from holdfast.locks import record
from holdfast.locks.record import MAX_BYTES, MAX_TAG_LENGTH, Record, check_tag, compose, parse, sanitise

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED = json.loads((GOLDEN / "records.json").read_text("utf-8"))
CONTROL = [*range(32), 127]

ours = Record(
    4711,
    1735420800,
    host="build7",
    boot="0f4c9d2e",
    start="8812345:4026531836",
    owner="9f86d081884c7d65",
    token=1735420800123456789,
)
OUR_FIELDS = (
    b"host=build7\nboot=0f4c9d2e\nstart=8812345:4026531836\nowner=9f86d081884c7d65\ntoken=01735420800123456789\n"
)


def with_tag(tag: str | None) -> Record:
    return Record(ours.pid, ours.timestamp, tag, ours.host, ours.boot, ours.start, ours.owner, ours.token)


# Golden files.


@pytest.mark.parametrize("name", EXPECTED)
def test_a_golden_file_is_read_as_it_always_was(name):
    assert parse((GOLDEN / name).read_bytes()) == Record(**EXPECTED[name])


def test_every_golden_file_has_an_expectation():
    assert sorted(path.name for path in GOLDEN.glob("*.lock")) == sorted(EXPECTED)


@pytest.mark.parametrize("name", [name for name in EXPECTED if "crlf" not in name])
def test_a_golden_file_is_written_byte_for_byte(name):
    assert compose(Record(**EXPECTED[name])) == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("name", [name for name in EXPECTED if "crlf" in name])
def test_a_crlf_file_differs_only_in_its_line_ends(name):
    """Guards the golden file itself: a checkout that converts line ends would make the test of reading it empty."""
    content = (GOLDEN / name).read_bytes()
    assert content.count(b"\r\n") == content.count(b"\n") > 0
    assert content.replace(b"\r\n", b"\n") == (GOLDEN / name.replace("-crlf", "")).read_bytes()


# Writing.


@pytest.mark.parametrize(
    ("tag", "line"), [("deploy-v1.2.3", b"tag=deploy-v1.2.3\n"), ("", b"tag=\n"), (None, b"")], ids=repr
)
def test_pid_timestamp_and_tag_come_first_then_our_own_fields(tag, line):
    assert compose(with_tag(tag)) == b"pid=4711\ntimestamp=1735420800\n" + line + OUR_FIELDS


@pytest.mark.parametrize(("tag", "line"), [("t", b"tag=t\n"), ("", b"tag=\n"), (None, b"")], ids=repr)
def test_without_our_fields_a_record_is_the_one_of_other_tools(tag, line):
    assert compose(Record(5, 1735420800, tag)) == b"pid=5\ntimestamp=1735420800\n" + line


def test_text_is_written_in_utf_8():
    assert b"\ntag=gr\xc3\xb6\xc3\x9fer \xf0\x9f\x94\x92\n" in compose(with_tag("größer 🔒"))


def test_a_token_always_has_as_many_digits():
    """So that it can be written in place once the name is ours."""
    for token in (0, 1, 1735420800123456789, 2**63 - 1):
        assert len(compose(Record(1, 2, token=token))) == len(compose(Record(1, 2, token=0)))
        assert parse(compose(Record(1, 2, token=token))).token == token


# Reading.


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_lines_end_in_lf_or_crlf(end):
    assert parse(end.join(["pid=5", "timestamp=6", "tag=x", ""]).encode()) == Record(5, 6, "x")


def test_line_ends_may_be_mixed_and_the_last_one_may_be_missing():
    assert parse(b"pid=5\r\ntimestamp=6\ntag=x") == Record(5, 6, "x")


def test_a_lone_carriage_return_ends_no_line():
    with pytest.raises(CorruptLock):
        parse(b"pid=5\rtimestamp=6\r")


def test_a_line_is_split_at_its_first_equals_sign():
    assert parse(b"pid=5\ntimestamp=6\ntag=a=b==c\n").tag == "a=b==c"


def test_an_equals_sign_too_many_spoils_a_number():
    with pytest.raises(CorruptLock, match="pid"):
        parse(b"pid==5\ntimestamp=6\n")


@pytest.mark.parametrize("space", [" ", "\t", "  \t ", "\v", "\f"], ids=ascii)
def test_white_space_around_key_and_value_does_not_count(space):
    lines = [
        f"{space}{key}{space}={space}{value}{space}" for key, value in (("pid", 5), ("timestamp", 6), ("tag", "x"))
    ]
    assert parse("\n".join(lines).encode()) == Record(5, 6, "x")


def test_white_space_inside_a_value_is_kept():
    assert parse(b"pid=5\ntimestamp=6\ntag=npm  run build\n").tag == "npm  run build"


@pytest.mark.parametrize(
    "line", ["", "   ", "no equals sign", "pid", "colour=red", "=", "=7", "PID=7", "Timestamp=7", "# pid"], ids=repr
)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_empty_lines_lines_without_equals_and_unknown_keys_are_ignored(line, where):
    lines = ["pid=5", "timestamp=6"]
    lines.insert(where, line)
    assert parse("\n".join(lines).encode()) == Record(5, 6)


def test_the_order_of_lines_does_not_matter():
    assert parse(b"tag=x\ntimestamp=6\npid=5\n") == Record(5, 6, "x")


@pytest.mark.parametrize("key", ["pid", "timestamp", "tag", "token", "host"])
def test_the_last_of_two_lines_with_one_key_counts(key):
    found = parse(f"pid=1\ntimestamp=1\ntag=1\ntoken=1\nhost=1\n{key}=2\n".encode())
    assert str(getattr(found, key)) == "2"
    assert [str(getattr(found, other)) for other in ("pid", "timestamp", "tag", "token", "host")].count("2") == 1


def test_the_last_of_two_counts_also_when_it_is_corrupt():
    with pytest.raises(CorruptLock, match="pid"):
        parse(b"pid=1\ntimestamp=1\npid=x\n")
    assert parse(b"pid=x\ntimestamp=1\npid=1\n") == Record(1, 1)


def test_no_tag_is_not_an_empty_tag():
    assert parse(b"pid=1\ntimestamp=1\n").tag is None
    assert parse(b"pid=1\ntimestamp=1\ntag=\n").tag == ""


def test_the_largest_numbers_that_fit():
    assert parse(b"pid=4294967295\ntimestamp=9223372036854775807\n") == Record(2**32 - 1, 2**63 - 1)


def test_leading_zeros_are_plain_decimal():
    assert parse(b"pid=007\ntimestamp=0000000010\n") == Record(7, 10)


NOT_NUMBERS = [
    "",
    " ",
    "12abc",
    "abc",
    "1.5",
    "1e3",
    "-5",
    "+5",
    "1_000",
    "1 000",
    "1,000",
    "0x10",
    "٤٢",
    "\uff14\uff12",
    "²",
    "1" * 40,
    "0" * 40 + "1",
    "9" * 10_000,
    "nan",
    "1\0",
    "1\x1b[0m",
]


@pytest.mark.parametrize("text", NOT_NUMBERS, ids=lambda text: ascii(text[:20]))
@pytest.mark.parametrize("key", ["pid", "timestamp"])
def test_a_number_that_is_not_plain_decimal_is_corrupt(key, text):
    other = "timestamp" if key == "pid" else "pid"
    with pytest.raises(CorruptLock, match=key) as caught:
        parse(f"{key}={text}\n{other}=1\n".encode())
    assert all(ord(character) not in CONTROL for character in str(caught.value))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("key", "number"), [("pid", 2**32), ("timestamp", 2**63), ("timestamp", 2**64 + 5)])
def test_a_number_that_does_not_fit_is_corrupt(key, number):
    other = "timestamp" if key == "pid" else "pid"
    with pytest.raises(CorruptLock, match=key):
        parse(f"{key}={number}\n{other}=1\n".encode())


@pytest.mark.parametrize(
    ("content", "missing"), [(b"timestamp=1\n", "pid"), (b"pid=1\n", "timestamp"), (b"tag=x\n", "")]
)
def test_a_missing_number_is_corrupt(content, missing):
    with pytest.raises(CorruptLock, match=f"no {missing}"):
        parse(content)


@pytest.mark.parametrize("content", [b"", b" ", b"\n", b"\r\n\r\n", b" \t\n \n", b"\0", b"\0" * 4096], ids=repr)
def test_an_empty_or_blank_file_is_corrupt(content):
    with pytest.raises(CorruptLock):
        parse(content)


@pytest.mark.parametrize(
    "junk",
    [b"\xff", b"\xc3", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf", "tag=ü".encode("utf-16")],
    ids=repr,
)
def test_invalid_utf_8_is_corrupt_even_where_nothing_looks(junk):
    with pytest.raises(CorruptLock, match="UTF-8"):
        parse(b"pid=1\ntimestamp=1\nunknown=" + junk + b"\n")


def test_more_than_64_kib_is_corrupt():
    start = b"pid=1\ntimestamp=1\nfiller="
    assert parse(start.ljust(64 * 1024, b"x")) == Record(1, 1)
    with pytest.raises(CorruptLock, match="65536"):
        parse(start.ljust(64 * 1024 + 1, b"x"))
    assert MAX_BYTES == 64 * 1024


@pytest.mark.parametrize("token", ["", "x", "-1", "1.5", "9" * 40, str(2**63), "٤٢"], ids=repr)
def test_a_token_that_is_no_number_is_no_token(token):
    """Unlike pid and timestamp it is not part of the protocol: to another tool `token` may mean anything."""
    assert parse(f"pid=1\ntimestamp=2\ntoken={token}\n".encode()) == Record(1, 2)


# Tags.


@pytest.mark.parametrize("code", CONTROL)
def test_control_characters_in_a_tag_become_spaces(code):
    assert sanitise(f"a{chr(code)}b") == check_tag(f"a{chr(code)}b") == "a b"


def test_a_tag_cannot_forge_a_line():
    content = compose(with_tag(check_tag("x\npid=1\r\ntimestamp=1\0")))
    assert content.startswith(b"pid=4711\ntimestamp=1735420800\ntag=x pid=1  timestamp=1 \nhost=")
    assert parse(content).pid == 4711


@pytest.mark.parametrize("code", [code for code in CONTROL if chr(code) != "\n"])
@pytest.mark.parametrize("key", ["tag", "host"])
def test_control_characters_that_are_read_become_spaces(code, key):
    assert getattr(parse(f"pid=1\ntimestamp=1\n{key}=a{chr(code)}b\n".encode()), key) == "a b"


def test_a_message_about_another_tools_file_steers_no_terminal(tmp_path, caplog):
    path = tmp_path / "x.lock"
    path.write_bytes(b"pid=1\ntimestamp=4102444800\ntag=a\x1b[31mb\x7f\x07c\nhost=h\x1b]0;i\n")
    lock = holdfast.LockFile(path)
    assert lock.status().tag == "a [31mb  c"
    with pytest.raises(holdfast.Busy, match="pid 1 on h ]0;i") as busy:
        lock.acquire(timeout=0)
    with pytest.raises(holdfast.NotOwner, match=r"a \[31mb  c") as not_owner:
        lock.release_as_owner(pid=2)
    with caplog.at_level(logging.INFO, "holdfast"):
        lock.break_()
    (logged,) = caplog.messages
    assert "a [31mb  c" in logged
    for text in (str(busy.value), str(not_owner.value), logged):
        assert all(ord(character) not in CONTROL for character in text)


def test_a_tag_has_at_most_10_000_characters(tmp_path):
    assert MAX_TAG_LENGTH == 10_000
    longest = "🔒" * 10_000
    assert parse(compose(with_tag(check_tag(longest)))).tag == longest
    with pytest.raises(ValueError, match="at most 10000 characters, not 10001"):
        check_tag("x" * 10_001)
    with pytest.raises(ValueError, match="10001"):
        holdfast.LockFile(tmp_path / "x.lock", tag="x" * 10_001)


def test_the_longest_tag_goes_through_a_lock_file(tmp_path):
    """Four bytes for each of 10,000 characters are well below the 64 KiB at which a reader gives up."""
    lock = holdfast.LockFile(tmp_path / "x.lock", tag="🔒" * 10_000)
    with lock:
        assert lock.status().tag == "🔒" * 10_000


@pytest.mark.parametrize("tag", ["größer", "部署", "🔒 é", "a\u0301", "x\u2028y", "%d %s %b %", "a=b"], ids=ascii)
def test_unicode_and_signs_are_kept(tmp_path, tag):
    lock = holdfast.LockFile(tmp_path / "x.lock", tag=tag)
    with lock:
        assert f"\ntag={tag}\n".encode() in (tmp_path / "x.lock").read_bytes()
        assert lock.status().tag == tag


@pytest.mark.parametrize("tag", ["\ud800", "a\udcffb", "\udfff\ud800"], ids=ascii)
def test_lone_surrogates_cannot_be_written_and_become_question_marks(tmp_path, tag):
    """They come from file names and arguments that are not UTF-8."""
    lock = holdfast.LockFile(tmp_path / "x.lock", tag=tag)
    with lock:
        assert lock.status().tag == "".join("?" if "\ud800" <= letter <= "\udfff" else letter for letter in tag)


def test_no_tag_gives_no_line_and_an_empty_tag_an_empty_one(tmp_path):
    path = tmp_path / "x.lock"
    with holdfast.LockFile(path):
        assert b"tag" not in path.read_bytes()
    with holdfast.LockFile(path, tag=""):
        assert path.read_bytes().split(b"\n")[2] == b"tag="


# Whatever the bytes.


def assert_record_or_corrupt(content: bytes) -> None:
    try:
        found = parse(content)
    except CorruptLock as error:
        assert str(error)  # noqa: PT017
        return
    assert type(found) is Record
    assert type(found.pid) is int and 0 <= found.pid < 2**32
    assert type(found.timestamp) is int and 0 <= found.timestamp < 2**63
    assert found.token is None or 0 <= found.token < 2**63
    for text in (found.tag, found.host):
        assert text is None or all(ord(character) not in CONTROL for character in text)


@given(st.binary(max_size=300))
@example(b"pid=\xd9\xa4\ntimestamp=1")
@example(b"pid=1\ntimestamp=1\ntoken=\xc2\xb2")
def test_any_bytes_give_a_record_or_corrupt_lock(content):
    assert_record_or_corrupt(content)


keys = st.sampled_from(["pid", "timestamp", "tag", "host", "boot", "start", "owner", "token", "", "unknown", "pi d"])
spaces = st.text(" \t\r\v\f\x1c\x85\u00a0\u2028", max_size=2)
numbers = st.one_of(
    st.integers(-5, 2**70).map(str),
    st.from_regex(r"[0-9+\-_.eExX]{0,45}", fullmatch=True),
    st.text(st.characters(categories=["Nd", "No", "Nl"]), max_size=5),
)
values = st.one_of(numbers, st.text(max_size=20))
lines = st.one_of(
    st.tuples(spaces, keys, spaces, st.sampled_from(["=", "=", "=", "==", ""]), spaces, values, spaces).map("".join),
    st.text(max_size=20),
)
near_valid = st.builds(
    lambda found, end, cut: end.join(found).encode("utf-8", "surrogatepass")[cut:],
    st.lists(lines, max_size=8),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.integers(0, 3),
)


@given(near_valid)
def test_nearly_valid_text_gives_a_record_or_corrupt_lock(content):
    assert_record_or_corrupt(content)


@given(near_valid, st.integers(0, 300), st.binary(min_size=1, max_size=3))
def test_a_good_file_with_a_damaged_spot_gives_a_record_or_corrupt_lock(content, where, junk):
    whole = compose(ours) + content
    assert_record_or_corrupt(whole[:where] + junk + whole[where:])
    assert_record_or_corrupt(whole[:where])


tags = st.none() | st.text(max_size=50).map(lambda text: check_tag(text).strip())
words = st.none() | st.text("abcdef0123456789-:", max_size=20)
any_record = st.builds(
    Record,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63 - 1),
    tags,
    words,
    words,
    words,
    words,
    st.none() | st.integers(0, 2**63 - 1),
)


@given(any_record)
@example(with_tag("100 % owner= timestamp=0"))
def test_a_record_that_is_written_is_read_again(written):
    content = compose(written)
    assert parse(content) == written
    assert parse(content.replace(b"\n", b"\r\n")) == written


@given(tags, words, st.integers(10**9, 2**33), st.integers(0, 2**64))
@example("owner=", "timestamp=0", 1735420800, 7)
@example("timestamp=0000000000", None, 1735420800, 7)
@example("100%d %(x)s %%", "owner=", 1735420800, 7)
def test_a_writer_and_compose_write_the_same_bytes(tag, host, timestamp, serial):
    me = copy(owner.me())
    me.host = host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "me", lambda: me)
        patch.setattr(record, "time", lambda: float(timestamp))
        content = record.Writer(record.SEMA, tag).write(serial)
    who = f"{me.random.decode()}{serial:x}"
    assert content == compose(Record(me.pid, timestamp, tag, host, me.boot, me.start, who, 0))
