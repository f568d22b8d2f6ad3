"""The processes of the doctor's run pass: how they are followed and ended, and who ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.doctor.watching import ranks
from paceline.doctor.watching.following import _cpu_s, _Following
from paceline.doctor.watching.keeper import end_all_of
from paceline.doctor.watching.launching import rank_option
from paceline.doctor.watching.probe import serving
from paceline.doctor.watching.records import pack
from paceline.doctor.watching.scratch import Scratch
from paceline.errors import UsageError


@contextlib.contextmanager
def a_rank(*command: str) -> Iterator[ranks.Rank]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
    rank = ranks.Rank(0, popen, ours, Path("stacks"), {})
    with theirs:
        try:
            yield rank
        finally:
            rank.end()


def test_what_leaves_its_group_is_ended_and_nobody_else() -> None:
    def sleeper(run_id: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "TORCHELASTIC_RUN_ID": run_id}
        return subprocess.Popen(["sleep", "60"], start_new_session=True, env=environ)

    with sleeper("a-run") as ours, sleeper("a-run-of-others") as others:
        end_all_of("a-run")
        assert ours.wait(10) == -9
        assert others.poll() is None
        others.kill()


def test_a_keeper_that_has_died_is_told_in_four_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        a_rank("sleep", "60") as rank,
        ranks._keeper("a-run", Path("none")) as link,
        pytest.raises(UsageError, match="cannot watch over the ranks"),
    ):
        while True:  # until it has
            ranks._tell_keeper(link, rank)
            time.sleep(0.01)


def test_ranks_that_cannot_be_started_are_told_in_four_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory, no more processes, too long a command line."""
    script = tmp_path / "train.py"
    script.touch()
    with (
        pytest.raises(UsageError, match=r"cannot start the ranks: found \[Errno 7\] .*--workers"),
        ranks.started(script, ["x" * 1_000_000], 2, Scratch(tmp_path, in_place=True), "none"),
    ):
        pass
    monkeypatch.setattr(sys, "executable", "/not/there")
    with pytest.raises(UsageError, match="cannot start the ranks"), ranks._keeper("a-run", tmp_path):
        pass


SAVES = """
import sys, time
from paceline.doctor.watching.probe.files import _whole
while True:
    with _whole(), open(sys.argv[1], "w") as file:
        for part in "whole":
            file.write(part)
            file.flush()
            time.sleep(0.1)
"""


def test_who_saves_in_place_and_is_asked_to_end_saves_it_whole(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with a_rank(sys.executable, "-c", SAVES, str(saved)) as rank:
        while not (saved.exists() and saved.read_text() == "wh"):
            assert rank.process.ended() is None
        ranks._let_end([rank])
        assert rank.process.ended() == -signal.SIGTERM
    assert saved.read_text() == "whole"


def test_who_does_not_end_when_asked_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PUT_IN_ORDER_S", 0.2)
    with a_rank("sh", "-c", "trap '' TERM; echo deaf; sleep 60") as rank:
        while not rank._tail:
            rank.read()
        ranks._let_end([rank])
        assert rank.process.ended() is None
    assert rank.process.ended() == -signal.SIGKILL


def test_a_store_that_cannot_be_served_is_told_in_four_beats(tmp_path: Path) -> None:
    code = (
        "import socket, sys, types\nfrom pathlib import Path\n"
        "from paceline.doctor.watching.probe.serving import serve_once\n"
        "sys.modules['torch.distributed'] = types.ModuleType('broken')\n"
        "for _ in range(2):\n    listener = socket.create_server(('127.0.0.1', 0))\n"
        f"    serve_once(listener.detach(), Path({str(tmp_path)!r}))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    deadline_s = time.monotonic() + 20
    while not (tmp_path / serving.FAILED).exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with pytest.raises(UsageError, match=r"cannot let the ranks meet: found .*TCPStore"):
        ranks._be_sure_of_store(Scratch(tmp_path, in_place=False))


def test_who_has_left_its_group_still_computes() -> None:
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as busy:  # in this process's group
        deadline_s = time.monotonic() + 20
        while not _cpu_s([busy.pid])[busy.pid] > 0 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        spent_s = _cpu_s([busy.pid])[busy.pid]
        busy.kill()
    assert spent_s > 0


@pytest.mark.parametrize(("kind", "stopped"), [("end", "ended"), ("begin", "time")])
def test_who_has_come_to_its_end_when_time_is_up_has_ended(kind: str, stopped: str) -> None:
    """Though Python is not done yet with ending."""
    told = {"kind": kind, "number": 1, "places": [], "syncs": 0, "facts": {}, "at_s": 1.0, "child": None}
    with a_rank("sleep", "60") as rank:
        rank.account.take(pack(told))
        assert _Following([rank], 20, time.monotonic() - 1.0, None).over() == stopped


def test_who_has_become_another_program_is_not_waited_for() -> None:
    told = {"kind": "exec", "number": 1, "places": [], "syncs": 0, "facts": {}, "at_s": 1.0, "child": None}
    with a_rank("sleep", "60") as rank:
        following = _Following([rank], 20, time.monotonic() + 60.0, None)
        rank.account.take(pack(told))
        assert following.over() is None  # there may be no such program
        rank.silent = True
        assert following.over() == "spawned"


SHOWN = """
import os, sys
from paceline.doctor.watching.probe.files import _is_shown
assert _is_shown(sys.stdout) and not _is_shown(sys.stderr)
log = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.dup2(log, 1)
assert not _is_shown(sys.stdout) and not _is_shown(os.fdopen(log, "w"))
"""


def test_what_is_written_to_a_file_in_place_of_the_screen_is_not_printed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SHOWN, str(tmp_path / "log")], check=True, stdout=subprocess.PIPE, timeout=60)


DECLARES = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('-l', '--local_rank', type=int)\n"


@pytest.mark.parametrize(
    ("files", "words", "option"),
    [
        ({"train": DECLARES}, [], "--local_rank"),
        ({"train": "from options import parser\n", "options": DECLARES}, ["--lr", "1"], "--local_rank"),
        ({"train": DECLARES.replace("local_", "local-")}, [], "--local-rank"),
        ({"train": DECLARES}, ["--local-rank=1"], None),
        ({"train": DECLARES + "import os\nos.environ.get('LOCAL_RANK', 0)\n"}, [], None),
        ({"train": "# " + DECLARES.replace("\n", "\n# ")}, [], None),
        ({"train": "import other\n", "other": DECLARES + "if __name__ == '__main__':\n    main()\n"}, [], None),
    ],
    ids=["declares", "imports", "hyphen", "given", "asks environment", "comment", "another script"],
)
def test_who_declares_local_rank_and_knows_no_torchrun_is_given_it(
    files: dict[str, str], words: list[str], option: str | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert rank_option(tmp_path / "train.py", words) == option
