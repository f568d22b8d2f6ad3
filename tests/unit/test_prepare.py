"""`prepare`: the documents that go in come out, the bytes depend on nothing else, and nothing half-done is left."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.documents import PIECE_BYTES, InputFile, SplitRule, find_files, plan_units, planned_bytes
from paceline.data.output import sole_writer
from paceline.data.prepare import prepare, prepare_once
from paceline.data.tokenizer import FileTokenizer, load_tokenizer, pieces, read_tokenizer, train_bpe
from paceline.errors import DataError

Splits = dict[str, list[bytes]]


def documents(out: Path) -> Splits:
    """The documents of every split of a prepared folder, as their UTF-8 bytes."""
    index = json.loads((out / "index.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(index["tokenizer"], out)
    found: Splits = {}
    for split, said in index["splits"].items():
        ids = np.fromfile(out / said["file"], {"uint16": "<u2", "uint32": "<u4"}[index["dtype"]])
        assert len(ids) == said["tokens"]
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.end_of_text) + 1)
        assert parts.pop().size == 0, "every document ends in an end of text"
        assert len(parts) == said["documents"]
        found[split] = [tokenizer.decode(part.tolist()).encode() for part in parts]
        assert sum(map(len, found[split])) == said["bytes"]
    return found


def everything(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of 16 KiB: what is long and takes many of them need not take long."""
    monkeypatch.setattr("paceline.data.documents.PIECE_BYTES", 2**14)
    monkeypatch.setattr("paceline.data.documents._BREAK_BYTES", 2**10)


@pytest.fixture
def library(tmp_path: Path, small_pieces: None) -> Path:
    """200 small texts in folders and a long one, its lines of uneven length and not all ASCII."""
    folder = tmp_path / "library"
    for i in range(200):
        path = folder / f"shelf-{i % 7}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {i} é\n" * (i % 50 + 1), encoding="utf-8")
    long = "".join(f"{'wörd ' * (i % 90)}{i}\n" for i in range(600))
    (folder / "long.txt").write_text(long, encoding="utf-8")
    return folder


def test_documents_come_out_in_order_of_relative_path(library: Path, tmp_path: Path) -> None:
    (library / "long.txt").unlink()
    index = prepare([library], tmp_path / "out", valid=0.1)
    found = documents(tmp_path / "out")
    paths = sorted(library.rglob("*.txt"), key=lambda path: path.relative_to(library).as_posix())
    originals = [path.read_bytes() for path in paths]
    assert sorted(found["train"] + found["valid"]) == sorted(originals)
    assert found["train"] == [text for text in originals if text in set(found["train"])]
    assert index["vocabulary"] == 257 and index["dtype"] == "uint16" and index["split"]["rule"] == "document"
    assert 5 < len(found["valid"]) < 40


@pytest.mark.parametrize(("tokenizer", "rule"), [("bytes", "document"), ("bpe:300", "tail")])
def test_the_number_of_processes_changes_no_byte(library: Path, tmp_path: Path, tokenizer: str, rule: str) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {i} " * 10}) + "\n" for i in range(600)), encoding="utf-8")
    sources = [library, lines] if rule == "document" else [library / "long.txt"]
    told: list[tuple[int, int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((os.getpid(), done, total))

    for processes in (1, 2):
        out = tmp_path / f"out-{processes}"
        index = prepare(sources, out, tokenizer=tokenizer, processes=processes, progress=progress, valid=0.1)
        assert index["split"]["rule"] == rule
        assert {pid for pid, _, _ in told} == {os.getpid()}, "progress is told by the caller's process"
        assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
        assert told[-1][1] == told[-1][2] > 0
        told.clear()
    assert everything(tmp_path / "out-1") == everything(tmp_path / "out-2")


def test_the_split_never_changes() -> None:
    """A golden record: another result here is another held-out set for everybody."""
    rule = SplitRule(kind="document", valid=0.2)
    held_out = [i for i in range(30) if rule.split(f"document {i}".encode()) == "valid"]
    assert held_out == [1, 9, 11, 17, 18, 22, 23, 24, 26, 29]


def test_the_split_is_a_function_of_the_document_alone(library: Path, tmp_path: Path) -> None:
    (library / "long.txt").unlink()
    shelves = sorted(library.iterdir())
    prepare(shelves, tmp_path / "forwards", valid=0.1)
    prepare(shelves[::-1], tmp_path / "backwards", valid=0.1)
    prepare([*shelves[:3]], tmp_path / "fewer", valid=0.1)
    forwards, backwards = documents(tmp_path / "forwards"), documents(tmp_path / "backwards")
    assert sorted(forwards["valid"]) == sorted(backwards["valid"])
    assert set(documents(tmp_path / "fewer")["valid"]) <= set(forwards["valid"])


def test_one_text_is_split_at_its_tail(tmp_path: Path) -> None:
    text = "".join(f"Line {i}.\n" for i in range(1000)).encode()
    source = tmp_path / "input.txt"
    source.write_bytes(text)
    index = prepare([source], tmp_path / "out", valid=0.1)
    (train,), (valid,) = documents(tmp_path / "out").values()
    assert train + valid == text
    assert train.endswith(b".\n") and valid.startswith(b"Line ")
    assert 0.08 < len(valid) / len(text) < 0.11
    assert index["split"]["rule"] == "tail"


@settings(deadline=None)
@given(
    text=st.text(min_size=1, max_size=60).map(lambda text: text.encode("utf-8", "replace")), valid=st.floats(0, 0.99)
)
def test_a_tail_is_cut_between_characters_and_leaves_something_to_train_on(text: bytes, valid: float) -> None:
    rule = SplitRule(kind="tail", valid=valid)
    target = rule.cut_target(len(text))
    cut = rule.cut(target, len(text), text[target:])
    assert 0 < cut <= len(text)
    assert text[:cut].decode() + text[cut:].decode() == text.decode()


@settings(max_examples=30, deadline=None)
@given(line=st.integers(1, 3_000_000), size=st.integers(1, 4_000_000), tail=st.booleans())
def test_a_long_text_is_covered_by_bounded_pieces(
    tmp_path_factory: pytest.TempPathFactory, line: int, size: int, tail: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "covered.txt"
    text = (("é" * line)[: line - 1] + "\n") * (size // (2 * line) + 1)
    path.write_text(text, encoding="utf-8")
    data = path.read_bytes()
    file = InputFile(path=path, size=len(data), lines=False)
    units = list(plan_units([file], SplitRule(kind="tail" if tail else "document", valid=0.2)))
    if units[0].kind == "files":
        assert len(data) <= PIECE_BYTES
        return
    bounds = [(unit.start, unit.stop) for unit in units]
    assert [start for start, _ in bounds] == [0] + [stop for _, stop in bounds[:-1]] and bounds[-1][1] == len(data)
    for start, stop in bounds:
        assert 0 < stop - start <= PIECE_BYTES + 3
        data[start:stop].decode()


def test_no_valid_split_when_none_is_wanted(library: Path, tmp_path: Path) -> None:
    index = prepare([library], tmp_path / "out", valid=0)
    assert index["splits"]["valid"]["tokens"] == 0 and index["splits"]["train"]["documents"] == 201


def test_jsonl_fields_blank_lines_and_a_missing_last_newline(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"body": "one"}\n\n{"body": "two \\u00e9", "x": 1}\r\n{"body": ""}\n{"body": "end"}', "utf-8")
    prepare([source], tmp_path / "out", field="body", valid=0)
    assert documents(tmp_path / "out")["train"] == [b"one", "two é".encode(), b"end"]


@pytest.mark.parametrize("last", [1, 100, 5_000, 100_000, 10**9])
def test_a_limit_ends_with_the_document_that_reaches_it(small_pieces: None, tmp_path: Path, last: int) -> None:
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"number {i} " * 30}) + "\n" for i in range(800)]
    source.write_text("".join(lines), encoding="utf-8")
    index = prepare([source], tmp_path / "out", limit_bytes=last, valid=0)
    sizes = np.cumsum([len(line) for line in lines])
    assert index["splits"]["train"]["documents"] == min(int(np.searchsorted(sizes, last)) + 1, len(lines))


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    index = prepare(["python-stdlib"], tmp_path / "out", limit_bytes=500_000)
    assert 500_000 <= sum(index["splits"][split]["bytes"] for split in ("train", "valid")) < 1_000_000
    assert index["sources"] == [f"python-stdlib of Python {sys.version.split()[0]}"]
    files = find_files(["python-stdlib"])
    assert all(file.lenient for file in files)
    assert not any("site-packages" in file.path.parts for file in files)
    assert planned_bytes(files) > 10_000_000


def test_memory_is_flat_in_the_size_of_a_file(tmp_path: Path) -> None:
    def peak(mebibytes: int) -> int:
        source = tmp_path / f"{mebibytes}.txt"
        source.write_bytes(b"0123456789abcde\n" * (mebibytes * 2**16))
        tracemalloc.start()
        prepare([source], tmp_path / f"out-{mebibytes}", processes=1)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(24) < peak(4) * 1.1 + 2**18


def test_bpe_round_trips_and_is_stored_beside_its_tokens(library: Path, tmp_path: Path) -> None:
    index = prepare([library], tmp_path / "out", tokenizer="bpe:400", valid=0)
    originals = sorted(path.read_bytes() for path in library.rglob("*.txt"))
    assert sorted(documents(tmp_path / "out")["train"]) == originals
    assert index["vocabulary"] <= 400
    assert index["splits"]["train"]["tokens"] < index["splits"]["train"]["bytes"]
    again = prepare([library], tmp_path / "again", tokenizer=str(tmp_path / "out" / "tokenizer.json"), valid=0)
    assert again["splits"] == index["splits"]


def test_no_text_can_end_its_own_document() -> None:
    tokenizer = train_bpe(["a text with <|endoftext|> in it"] * 3, 300)
    text = "before<|endoftext|>after"
    assert tokenizer.end_of_text not in tokenizer.encode(text)
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.end_of_text]) == text


@settings(deadline=None)
@given(text=st.text(alphabet="ab\n", max_size=50), characters=st.integers(1, 9))
def test_pieces_are_the_text(text: str, characters: int) -> None:
    parts = list(pieces(text, characters))
    assert "".join(parts) == text
    assert all(0 < len(part) <= characters for part in parts)


def test_a_tokenizer_needs_an_end_of_text(tmp_path: Path) -> None:
    whole = train_bpe(["text"], 300).json_text
    renamed = tmp_path / "renamed.json"
    renamed.write_text(whole.replace("<|endoftext|>", "</s>"), encoding="utf-8")
    assert read_tokenizer(renamed).spec == {"kind": "tokenizer.json", "end_of_text": "</s>"}
    with pytest.raises(DataError, match=r"found no token that ends a text, need one of <\|endoftext\|>, </s>"):
        FileTokenizer(whole.replace("<|endoftext|>", "<|nothing|>"))
    with pytest.raises(DataError, match=r"cannot use tokenizer.json as a tokenizer"):
        FileTokenizer("{}")


BAD: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "undecodable": ("a.txt", b"fine\nnot \xff fine", {}, r"a.txt: found byte 0xff at offset 9, need UTF-8.*--errors"),
    "undecodable line": ("a.jsonl", b'{"text": "x"}\n{"text": "\xfe"}\n', {}, r"a.jsonl line 2: found byte 0xfe"),
    "no JSON": ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', {}, r"a.jsonl line 3: found no JSON: .*--errors skip"),
    "no object": ("a.jsonl", b'["x"]\n', {}, r"a.jsonl line 1: found list .*need a JSON object"),
    "no such field": ("a.jsonl", b'{"texts": "x"}\n', {}, r"line 1: found no field 'text'.*Did you mean 'texts'"),
    "no string": ("a.jsonl", b'{"text": 3}\n', {}, r"line 1: found int in field 'text', need a string"),
    "half a pair": ("a.jsonl", b'{"text": "\\ud83d"}\n', {}, r"line 1: found a lone surrogate U\+D83D"),
    "empty": ("a.txt", b"", {}, r"found 1 files without a byte"),
    "bad size": ("a.txt", b"x", {"tokenizer": "bpe:12"}, r"found 'bpe:12', need bpe:N with a whole number N, 257 to"),
    "bad great size": ("a.txt", b"x", {"tokenizer": f"bpe:{10**20}"}, r"found 'bpe:10+', need bpe:N .*257 to 1048576"),
    "no tokenizer": ("a.txt", b"x", {"tokenizer": "byte"}, r"tokenizer byte: found No such file.*bytes, bpe:N or"),
    "bad fraction": ("a.txt", b"x", {"valid": 5}, r"found valid=5, need 0 <= valid < 1"),
    "too many": ("a.txt", b"x", {"processes": 1000}, r"found processes=1000, need 1 <= processes <= 256"),
    "nothing left": ("a.txt", b"\xff", {"errors": "skip"}, r"found no text: 1 documents skipped"),
}


@pytest.mark.parametrize(("name", "content", "options", "complaint"), BAD.values(), ids=list(BAD))
def test_bad_input_is_named_and_leaves_nothing(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any], complaint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        prepare([tmp_path / name], tmp_path / "out", **options)
    assert names(tmp_path) == [name]


def test_missing_and_empty_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.txt', which does not exist"):
        prepare([tmp_path / "gone.txt"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"cannot find text in .*empty: found an empty folder"):
        prepare([tmp_path / "empty"], tmp_path / "out")
    (tmp_path / "empty" / "a.md").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match=r"found no \*.txt or \*.jsonl, but 1 .md.*--glob '\*.md'"):
        prepare([tmp_path / "empty"], tmp_path / "out")
    with pytest.raises(DataError, match=r"cannot use the glob '/\*.md': .*need a pattern of names below the folder"):
        prepare([tmp_path / "empty"], tmp_path / "out", glob="/*.md")
    with pytest.raises(DataError, match=r"found '/dev/null', which is neither, need a file, a folder or"):
        prepare(["/dev/null"], tmp_path / "out")
    assert prepare([tmp_path / "empty"], tmp_path / "out", glob="*.md")["splits"]["train"]["bytes"] == 1


def test_a_source_whose_name_is_no_text_is_recorded(tmp_path: Path) -> None:
    name = os.fsdecode(b"a\xffb\xc3\xa9.txt")
    (tmp_path / name).write_text("x", encoding="utf-8")
    prepare([tmp_path / name], tmp_path / "out")
    index = (tmp_path / "out" / "index.json").read_text(encoding="utf-8")
    assert json.loads(index)["sources"] == [str(tmp_path / name)]
    assert "bé.txt" in index, "what is text stays readable"


def test_the_line_of_an_error_is_counted_over_units(small_pieces: None, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    good = json.dumps({"text": "x" * 300}) + "\n"
    source.write_text(good * 400 + "oops\n" + good * 400, encoding="utf-8")
    for processes in (1, 2):
        with pytest.raises(DataError, match=r"a.jsonl line 401: found no JSON"):
            prepare([source], tmp_path / "out", processes=processes)
    index = prepare([source], tmp_path / "out", errors="skip")
    assert index["skipped"] == {"documents": 1, "first": [f"{source} line 401"]}


@pytest.mark.parametrize("errors", ["replace", "skip"])
def test_undecodable_bytes_by_choice(small_pieces: None, tmp_path: Path, errors: Literal["replace", "skip"]) -> None:
    """Also deep inside a long text, whose beginning was written before the bad byte was met."""
    (tmp_path / "a.txt").write_bytes(b"good\n")
    (tmp_path / "b.txt").write_bytes(b"line\n" * 6000 + b"bad \xff\n" + b"line\n" * 3000)
    (tmp_path / "c.txt").write_bytes(b"b\xffd\n")
    (tmp_path / "d.txt").write_bytes(b"good too\n")
    index = prepare([tmp_path], tmp_path / "out", glob="*.txt", errors=errors, valid=0)
    train = documents(tmp_path / "out")["train"]
    if errors == "skip":
        assert train == [b"good\n", b"good too\n"]
        assert index["skipped"]["first"] == [str(tmp_path / "b.txt"), str(tmp_path / "c.txt")]
    else:
        assert [len(text) for text in train] == [5, 45_008, 6, 9]
        assert train[2] == "b\ufffdd\n".encode()
        assert index["replaced"] == {"documents": 2}


def test_an_existing_folder_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    prepare([tmp_path / "a.txt"], tmp_path / "out")
    with pytest.raises(DataError, match=r"Use another --out, or delete it first: rm -r .*out\.$"):
        prepare([tmp_path / "a.txt"], tmp_path / "out")
    assert names(tmp_path) == ["a.txt", "out"]


@pytest.mark.parametrize("out", ["", ".", "..", "/", "a.txt", "folder", "link"])
def test_nobody_is_told_to_delete_what_was_not_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x", encoding="utf-8")
    Path("folder").mkdir()
    Path("link").symlink_to("gone")
    with pytest.raises(DataError, match=r"found an existing file or folder of that name.* Use another --out\.$"):
        prepare(["a.txt"], out)
    assert names(tmp_path) == ["a.txt", "folder", "link"]


def test_a_killed_attempt_harms_nobody(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"line\n" * 500_000)
    program = (
        "import os, sys; from paceline.data.prepare import prepare;"
        "prepare([sys.argv[1]], sys.argv[2], processes=1, progress=lambda done, total: os.kill(os.getpid(), 9))"
    )
    killed = subprocess.run([sys.executable, "-c", program, source, tmp_path / "out"], check=False, timeout=30)
    assert killed.returncode == -signal.SIGKILL
    left = names(tmp_path)
    assert "out" not in left and any(name.startswith("out.tmp-") for name in left)
    prepare([source], tmp_path / "out")
    assert names(tmp_path) == ["a.txt", "out"]


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"line\n" * 500_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DataError, match=r"cannot write .*out: found File too large"):
            prepare([source], tmp_path / "out", processes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["a.txt"]


def test_several_processes_prepare_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\n" * 500_000)
    finished: list[int] = []

    def progress(done: int, total: int) -> None:
        if done == total:
            finished.append(done)

    def attempt(_: int) -> dict[str, Any]:
        return prepare_once(tmp_path / "out", sources=[tmp_path / "a.txt"], progress=progress, processes=1)

    with ThreadPoolExecutor(4) as threads:
        indices = list(threads.map(attempt, range(4)))
    assert all(index == indices[0] for index in indices)
    assert len(finished) <= 4 and names(tmp_path) == ["a.txt", "out"]
    written = (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    attempt(0)
    assert (tmp_path / "out" / "train.bin").stat().st_mtime_ns == written


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    with sole_writer(tmp_path / "out", wait_s=0.0):
        with pytest.raises(DataError, match=r"found another process that is preparing it"):
            prepare([tmp_path / "a.txt"], tmp_path / "out")
        with pytest.raises(DataError, match=r"found another process that is preparing it"):
            prepare_once(tmp_path / "out", sources=[tmp_path / "a.txt"], wait_s=0.1)
    prepare_once(tmp_path / "out", sources=[tmp_path / "a.txt"])


def test_a_helper_that_dies_is_an_error(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.encoding.PROGRAM", "import os; os._exit(9)")
    with pytest.raises(DataError, match=r"a helper process that ended \(exit code 9\)"):
        prepare([library], tmp_path / "out", processes=2)
    assert names(tmp_path) == ["library"]
