"""What a watched script may write to: its scratch folder, whose links stand for the user's files, and nothing else."""

from __future__ import annotations

import functools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.doctor.watching import scratch
from paceline.doctor.watching.guarded import guarded
from paceline.doctor.watching.records import Account, Place, Record, Run
from paceline.doctor.watching.scratch import Scratch, scratched, sweep
from paceline.errors import UsageError

LARGE = bytes(300_000)
"""More than is copied."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "large.bin").write_bytes(LARGE)
    return folder


def placed(tmp_path: Path, *folders: Path) -> Scratch:
    made = Scratch(tmp_path / "home", in_place=False)
    made.place(*folders)
    return made


def test_the_root_can_be_the_working_directory(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many containers. The machine's own folders are linked: nothing is copied from them."""
    monkeypatch.setattr(scratch, "_ENTRIES", 300)
    made = placed(tmp_path, Path("/"), project)
    now = made.within(Path("/"))
    assert now.is_dir() and not now.is_symlink() and now.is_relative_to(tmp_path)
    assert (now / "proc").is_symlink() and (now / "dev").is_symlink()
    assert made.within(project / "train.py").read_text() == "print(1)\n"
    assert made.translated("/usr/bin") == "/usr/bin"


def test_the_scratch_folder_can_be_inside_of_what_it_stands_for(tmp_path: Path, project: Path) -> None:
    """As when one works in /tmp."""
    made = placed(project, project)
    assert made.within(project / "train.py").read_text() == "print(1)\n"
    assert (made.within(project) / "home").is_symlink()


def test_what_is_no_plain_file_is_neither_read_nor_copied(tmp_path: Path, project: Path) -> None:
    os.mkfifo(project / "pipe")
    (project / "dangling").symlink_to("nowhere")
    (project / "itself").symlink_to("itself")
    (project / "up").symlink_to("..")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(project / "socket"))
        now = placed(tmp_path, project).within(project)
    assert sorted(path.name for path in now.iterdir()) == sorted(path.name for path in project.iterdir())
    assert not [name for name in ("pipe", "socket", "dangling", "itself", "up") if not (now / name).is_symlink()]


def test_links_inside_of_the_project_stay_inside_and_those_to_other_folders_are_folders(
    tmp_path: Path, project: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "last.pt").write_text("last")
    (project / "outputs").symlink_to(elsewhere)
    (project / "runs").mkdir()
    (project / "latest").symlink_to("runs")
    (project / "same.py").symlink_to(project / "train.py")
    now = placed(tmp_path, project).within(project)
    for name in ("outputs", "latest"):
        (now / name / "new").write_text("new")
    assert (now / "runs" / "new").is_file()
    assert (now / "same.py").resolve() == now / "train.py"
    assert [path.name for path in elsewhere.iterdir()] == ["last.pt"]
    assert (now / "outputs" / "last.pt").read_text() == "last"
    assert not list((project / "runs").iterdir())


def test_a_folder_of_samples_is_linked_and_what_lies_behind_it_is_not(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_FLAT", 50)
    for folder in ("data", "outputs/run1"):
        (project / folder).mkdir(parents=True)
    for number in range(scratch._FLAT + 1):
        (project / "data" / str(number)).touch()
    now = placed(tmp_path, project).within(project)
    assert (now / "data").is_symlink()
    (now / "outputs" / "run1" / "last.pt").write_text("new")
    assert not list((project / "outputs" / "run1").iterdir())


def test_sources_are_copied_however_many_small_files_come_before_them(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_COPIED_BYTES", 10)
    (project / "a.txt").write_text("more than ten bytes")
    (project / "env").mkdir()
    (project / "env" / "pyvenv.cfg").touch()
    now = placed(tmp_path, project).within(project)
    assert (now / "env").is_symlink()
    assert (now / "a.txt").is_symlink() and not (now / "train.py").is_symlink()


def test_a_folder_of_far_too_many_files_is_told_in_four_beats(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_ENTRIES", 1)
    monkeypatch.chdir(project)
    with (
        pytest.raises(UsageError, match=r"more than 1 files in .*--in-place"),
        scratched(Path("train.py"), in_place=False),
    ):
        pass


def test_a_full_disk_is_told_in_four_beats(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "notes.txt").write_bytes(bytes(100_000))
    monkeypatch.chdir(project)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with (
            pytest.raises(UsageError, match=r"found \[Errno \d+\].*TMPDIR"),
            scratched(Path("train.py"), in_place=False),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_only_what_nobody_holds_any_more_is_swept(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of runs that were killed; not those of runs that go on, of strangers, or that are links."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(project)
    dead, strange, elsewhere = (temporary / f"paceline-doctor-{name}" for name in ("dead", "strange", "link"))
    for folder in (dead, strange, project / "kept"):
        folder.mkdir()
        (folder / "file").touch()
    for folder in (dead, project / "kept"):
        (folder / "owner").touch()
    elsewhere.symlink_to(project / "kept")
    with scratched(Path("train.py"), in_place=False) as first, scratched(Path("train.py"), in_place=True) as second:
        assert not dead.exists()
        assert {*temporary.iterdir()} == {strange, elsewhere, first.home, second.home}
        sweep(temporary)
        assert first.within(Path("train.py")).is_file()
    assert {*temporary.iterdir()} == {strange, elsewhere}
    assert (project / "kept" / "file").exists()


def test_words_with_absolute_paths_are_translated(tmp_path: Path, project: Path) -> None:
    (project / ".venv").mkdir()
    made = placed(tmp_path, project)
    now = made.within(project)
    assert made.translated(f"--out={project}/out/") == f"--out={now}/out/"
    assert made.translated(str(project)) == str(now)
    unchanged = [str(project / ".venv" / "x"), "out", "--lr=1/2", "/", "/not/anywhere", str(tmp_path), "--rate=/s"]
    assert [made.translated(word) for word in unchanged] == unchanged
    new = Path(made.translated(str(tmp_path / "new" / "run")))
    assert new.is_relative_to(tmp_path / "home")
    assert made.translated(f"--log={tmp_path}/new/log") == f"--log={new.parent / 'log'}"
    assert made.moved[str(new.parent)] == str(tmp_path / "new")


def test_libraries_find_what_they_have_downloaded_and_add_to_it_in_the_scratch_folder(tmp_path: Path) -> None:
    cache, hub = tmp_path / "cache", tmp_path / "hub"
    for folder in (cache / "torch" / "hub", cache / "other", hub):
        folder.mkdir(parents=True)
    (cache / "torch" / "hub" / "net.pth").write_bytes(LARGE)
    made = Scratch(tmp_path / "home", in_place=False)
    environ = {"XDG_CACHE_HOME": str(cache), "HF_HOME": str(hub), "TORCH_HOME": "", "PYTHONPATH": f"x:{tmp_path}"}
    made.place_caches(environ)
    changed = made.environment(environ)
    assert set(changed) == {"XDG_CACHE_HOME", "HF_HOME", "TMPDIR", "PWD", "PYTHONPATH"}
    now = Path(changed["XDG_CACHE_HOME"])
    assert (now / "torch" / "hub" / "net.pth").read_bytes() == LARGE
    assert (now / "other").is_symlink()
    for folder in (now / "torch" / "hub", now / "matplotlib", Path(changed["HF_HOME"])):
        folder.mkdir(exist_ok=True)
        (folder / "new").touch()
    assert sorted(path.name for path in cache.iterdir()) == ["other", "torch"]
    assert len(list((cache / "torch" / "hub").iterdir())) == 1 and not list(hub.iterdir())
    assert Scratch(tmp_path / "none", in_place=True).environment(environ) == {}


ACTS: Mapping[str, str] = {
    "open": "open(f'{users}/file', 'w').write('x')",
    "append": "open(f'{users}/file', 'a').write('x')",
    "update": "open(f'{users}/file', 'r+').write('x')",
    "new file": "open(f'{users}/new', 'x')",
    "os.open": "os.open(f'{users}/file', os.O_RDONLY | os.O_TRUNC)",
    "through a linked folder": "open('folder/file', 'w').write('x')",
    "remove": "os.remove(f'{users}/file')",
    "remove in a linked folder": "os.remove('folder/file')",
    "rename": "os.rename(f'{users}/file', 'mine')",
    "rename onto": "open('m', 'w').close(); os.replace('m', f'{users}/file')",
    "mkdir": "os.makedirs(f'{users}/a/b')",
    "rmdir": "os.rmdir(f'{users}/empty')",
    "rmtree": "shutil.rmtree(users)",
    "move": "shutil.move(users, 'mine')",
    "symlink": "os.symlink('x', f'{users}/link')",
    "hard link": "os.link(f'{users}/file', 'hard'); open('hard', 'w').write('x')",
    "truncate": "os.truncate(f'{users}/file', 0)",
    "chmod": "os.chmod(f'{users}/file', 0o777)",
    "utime": "os.utime(f'{users}/file', (0, 0))",
    "touch": "pathlib.Path(f'{users}/file').touch()",
    "relative to a descriptor": "os.unlink('file', dir_fd=os.open(users, os.O_RDONLY))",
    "database": "sqlite3.connect(f'{users}/base').execute('drop table t')",
}
"""Each would change what is the user's."""
ACTS_IN_C: Mapping[str, str] = {
    "program": "subprocess.run(f'echo x > {users}/file', shell=True, check=True)",
    "program that removes": "subprocess.run(['rm', f'{users}/file'], check=True)",
    "program through a link": "subprocess.run('echo x > large', shell=True, check=True)",
    "C": "assert ctypes.CDLL(None).creat(f'{users}/file'.encode(), 0o644) >= 0",
    "C through a link": "assert ctypes.CDLL(None).open(b'large', os.O_WRONLY) >= 0",
}
ALLOWED: Mapping[str, str] = {
    "new": "open('new', 'w').write('x')",
    "folders": "os.makedirs('a/b'); os.rmdir('a/b'); shutil.rmtree('a')",
    "moves": "open('from', 'w').close(); os.makedirs('to'); shutil.move('from', 'to/there')",
    "temporary": "tempfile.NamedTemporaryFile().write(b'x')",
    "shared memory": "shared_memory.SharedMemory(create=True, size=8).unlink()",
    "into a circle": "os.symlink('o', 'o')\ntry: open('o', 'w')\nexcept OSError as e: assert e.errno == 40",
    "null": "open('/dev/null', 'w').write('x')",
    "read": "assert open(f'{users}/file').read() == 'as it was'",
    "read through a link": "assert len(open('large', 'rb').read()) == 300_000",
    "not there": "pathlib.Path(f'{users}/none').unlink(missing_ok=True)",
    "is there": "os.makedirs(users, exist_ok=True)",
    "programs": "subprocess.run('cat large > copy; rm copy', shell=True, check=True)",
    "read only database": "assert sqlite3.connect(f'file:{users}/base?mode=ro', uri=True).execute('select * from t')",
    "nowhere": "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
    "try: open('x', 'w')\nexcept FileNotFoundError: os.chdir(scratch)\nelse: raise AssertionError",
    "circle": "os.symlink('round', 'round'); os.path.isfile('round'); os.remove('round')",
    "link removed": "os.remove('removed')",
    "link moved": "os.rename('moved', 'elsewhere')",
    "link changed": "open('changed', 'r+b').write(b'x'); assert os.path.getsize('changed') == 300_000",
    "link replaced": "open('replaced', 'wb').write(b'x'); assert os.path.getsize('replaced') == 1",
    "link kept": "os.utime('kept', (0, 0)); os.chmod('kept', 0o600)",
}
GUARDED = """
import ctypes, json, os, pathlib, shutil, socket, sqlite3, subprocess, sys, tempfile
from multiprocessing import shared_memory
from paceline.doctor.watching.probe.guarding import Guard
from paceline.doctor.watching.probe.hooking import on_audit
from paceline.doctor.watching.probe.recorder import Recorder
scratch, users, kernel, acts = sys.argv[1], sys.argv[2], sys.argv[3] == "True", json.loads(sys.argv[4])
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
guard = Guard(Recorder(theirs, {}), pathlib.Path(scratch))
if kernel:
    guard.hold()
    assert json.loads(ours.recv(10_000))["facts"] == {"by": "landlock"}
on_audit(guard._recorder, guard.events)
os.chdir(scratch)
said = {}
for name, act in acts.items():
    try:
        exec(act)
        said[name] = None
    except Exception as error:
        said[name] = type(error).__name__
ours.setblocking(False)
told = []
try:
    while True:
        told.append(json.loads(ours.recv(10_000)))
except BlockingIOError:
    pass
print(json.dumps([said, told]))
"""


@functools.cache
def landlock() -> bool:
    code = (
        "from paceline.doctor.watching.probe.landlock import confine; from pathlib import Path\n"
        "raise SystemExit(not confine([Path('/dev/shm')]))"
    )
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def skip_without_landlock(kernel: bool) -> None:
    if kernel and not landlock():
        pytest.skip("this kernel has no Landlock")


def state(folder: Path) -> dict[str, object]:
    """All that there is of a folder."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in paths
    }


def acted(tmp_path: Path, acts: Mapping[str, str], *, kernel: bool) -> tuple[dict[str, str | None], list[str]]:
    """What came of each act, and the paths of which was told that they were refused; the user's files are as before."""
    users, inside = tmp_path / "users", tmp_path / "scratch"
    for folder in (users / "empty", inside / "tmp"):
        folder.mkdir(parents=True)
    (users / "file").write_text("as it was")
    (users / "large").write_bytes(LARGE)
    base = f"import sqlite3; c = sqlite3.connect({str(users / 'base')!r}); c.execute('create table t (x)'); c.close()"
    subprocess.run([sys.executable, "-c", base], check=True)
    (inside / "folder").symlink_to(users)
    for name in ("large", "removed", "moved", "changed", "replaced", "kept"):
        (inside / name).symlink_to(users / "large")
    before = state(users)
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, str(inside), str(users), str(kernel), json.dumps(acts)],
        env={**os.environ, "TMPDIR": str(inside / "tmp")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert state(users) == before
    said, told = json.loads(done.stdout.splitlines()[-1])
    assert not [record for record in told if record["kind"] == "fault"]
    return said, [record["facts"]["path"] for record in told if record["kind"] == "refused"]


@pytest.mark.parametrize("kernel", [True, False], ids=["landlock", "python"])
def test_nothing_that_python_does_changes_a_file_of_the_users(tmp_path: Path, kernel: bool) -> None:
    skip_without_landlock(kernel)
    said, refused = acted(tmp_path, ACTS, kernel=kernel)
    assert [name for name, error in said.items() if error is None] == []
    kinds = {"RefusedError", "OperationalError"}  # the latter: SQLite opens it to read, and is refused to write
    assert {name: error for name, error in said.items() if error not in kinds} == {}
    assert {str(tmp_path / "users" / name) for name in ("file", "new", "a", "empty", "link")} <= set(refused)


@pytest.mark.parametrize("kernel", [True, False], ids=["landlock", "python"])
def test_what_changes_no_file_of_the_users_is_let_through(tmp_path: Path, kernel: bool) -> None:
    skip_without_landlock(kernel)
    said, refused = acted(tmp_path, ALLOWED, kernel=kernel)
    assert {name: error for name, error in said.items() if error is not None} == {}
    assert refused == []


def test_with_landlock_nobody_changes_a_file_of_the_users(tmp_path: Path) -> None:
    skip_without_landlock(True)
    said, _ = acted(tmp_path, ACTS_IN_C, kernel=True)
    assert [name for name, error in said.items() if error is None] == []


RACING = """
import os, pathlib, socket, sys, threading
from paceline.doctor.watching.probe.guarding import Guard
from paceline.doctor.watching.probe.hooking import on_audit
from paceline.doctor.watching.probe.recorder import Recorder
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
recorder = Recorder(theirs, {})
on_audit(recorder, Guard(recorder, pathlib.Path(sys.argv[1])).events)
os.chdir(sys.argv[1])

def write():
    for number in range(30):
        with open(f"file-{number}", "a") as file:
            file.write("x")

threads = [threading.Thread(target=write) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_ranks_and_threads_that_write_to_one_link_at_once_all_write_to_one_copy(tmp_path: Path) -> None:
    users, inside = tmp_path / "users", tmp_path / "scratch"
    users.mkdir()
    inside.mkdir()
    for number in range(30):
        (users / f"file-{number}").write_text("as it was ")
        (inside / f"file-{number}").symlink_to(users / f"file-{number}")
    racing = [subprocess.Popen([sys.executable, "-c", RACING, str(inside)]) for _ in range(3)]
    assert [process.wait(60) for process in racing] == [0, 0, 0]
    assert {file.read_text() for file in users.iterdir()} == {"as it was "}
    assert {file.read_text() for file in inside.glob("file-*")} == {"as it was " + "x" * 6}


def record(kind: str, **facts: object) -> Record:
    return Record(kind=kind, rank=0, number=1, at_s=0.0, places=(Place("train.py", 7),), facts=facts)


def test_what_was_refused_is_told_where_it_matters() -> None:
    def notes(*records: Record) -> list[str]:
        return list(guarded(Run(accounts=[Account(rank=0, records=list(records))])))

    assert notes(record("guard", by="landlock")) == []
    assert "Landlock" in notes(record("guard", by="python"))[0]
    assert notes(record("refused", path="/home/x/.config/y", own=False)) == []
    (note,) = notes(record("refused", path="/data/out", own=True))
    assert "/data/out (train.py:7)" in note and "--in-place" in note
    failed = record("error", type="RefusedError", text="[Errno 13]")
    assert "/data/out" in notes(record("refused", path="/data/out", own=False), failed)[0]
    (note,) = notes(record("error", type="SafetensorError", text="I/O error: Permission denied (os error 13)"))
    assert "--in-place" in note
    many = [record("refused", path=f"/data/{number}", own=True) for number in range(9)]
    assert len(notes(*many)) == 4
