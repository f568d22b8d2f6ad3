"""A rank's account takes whatever it is told, in bounded space and time."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from paceline.doctor.watching import probe
from paceline.doctor.watching.judging import judge
from paceline.doctor.watching.records import KEPT_BYTES, LASTING, Account, pack
from told import run_of


def message(numbered: int, kind: str, *, aside: bool = False, **facts: Any) -> bytes:
    common = {"places": [], "syncs": 0, "at_s": 1.0, "child": None, "aside": aside}
    return pack({"kind": kind, "number": numbered, "facts": facts, **common})


def ended(number: int) -> bytes:
    return pack({"kind": "done", "of": number, "facts": {}, "at_s": 2.0, "child": None, "aside": False})


def test_an_account_is_bounded_and_says_what_it_left_out(tmp_path: Path) -> None:
    accounts = []
    for rank in (0, 1):
        account = Account(rank=rank)
        batch = message(1, "batch", loader=0, number=0, rows=["x" * 50_000], indices=[1])
        kept = KEPT_BYTES // len(batch)
        for _ in range(kept + 10):
            account.take(batch)
        account.take(message(2, "collective", op="barrier"))
        account.take(message(3, "end", code=0))
        accounts.append(account)
        assert len(account.records) == kept + 1
        assert (account.told["batch"], account.dropped) == (kept + 10, 11)
        waiting = account.waiting()
        assert waiting is not None and waiting["op"] == "barrier"
    run = run_of(stopped="time")
    run.accounts = accounts
    assert any(note.startswith("the ranks told more than is kept: 22 reports") for note in judge(run).notes)


def test_taking_a_message_costs_the_same_however_many_came_before() -> None:
    account = Account(rank=0)

    def elapsed_s(count: int) -> float:
        began_s = time.perf_counter()
        for number in range(count):
            account.take(message(number, "forward"))
            account.take(ended(number))
            account.waiting()
        return time.perf_counter() - began_s

    first_s, later_s = elapsed_s(500), min(elapsed_s(500) for _ in range(4))
    assert later_s < 5 * first_s


def test_what_another_thread_does_is_no_waiting_of_the_rank() -> None:
    account = Account(rank=0)
    account.take(message(1, "collective", op="barrier"))
    moves = account.moves
    account.take(message(2, "sleep", aside=True, seconds=1.0))
    assert account.moves == moves
    waiting = account.waiting()
    assert waiting is not None and waiting.kind == "collective"


def test_whatever_the_probe_tells_the_end_of_is_kept_until_then() -> None:
    """Of kinds that are not in `LASTING` the end would be lost."""
    ends = set()
    for file in set(Path(probe.__file__ or "").parent.glob("[!h]*.py")):  # hooking.py shows one that is not there
        for function in re.split(r"^    ?(?=def )|^(?=def )", file.read_text(), flags=re.M):
            if re.search(r"\.done\(", function):
                ends |= set(re.findall(r"number = (?:call\.)?recorder\.tell\(\s*\"([\w-]+)\"", function))
    assert {"collective", "step", "no-sync"} <= ends | {"step"}
    assert ends <= LASTING
