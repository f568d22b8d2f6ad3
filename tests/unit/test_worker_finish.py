"""How a worker ends whose modules are not taken down: nothing that a normal end would do is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, ctypes, sys, threading, time
from paceline.worker import finish

written = open("written", "w")
written.write("never closed")
raw = open("raw", "wb")
raw.write(b"neither")
closed = open("closed", "w")
closed.close()
atexit.register(print, "at exit")

def late():
    time.sleep(0.2)
    open("late", "w").write("of a thread")

threading.Thread(target=late).start()
ctypes.CDLL(None).printf(b"of a library\\n")
print("printed", end=" ")
class Broken:
    def __del__(self): open("deleted", "w")
broken = Broken()
finish(3)
"""


def test_files_threads_exit_handlers_and_output_are_finished(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert sorted(ended.stdout.split("\n")) == ["", "of a library", "printed at exit"]
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told == {"written": "never closed", "raw": "neither", "closed": "", "late": "of a thread"}


def test_a_pipe_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    program = (
        "import os; from paceline.worker import finish\n"
        "r, w = os.pipe(); os.close(r); lost = os.fdopen(w, 'w'); lost.write('x'); finish(0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
