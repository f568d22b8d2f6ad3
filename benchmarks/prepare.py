"""How fast `paceline prepare` is and how much memory it takes, on a generated text; exits 1 below the bar.

    .venv/bin/python benchmarks/prepare.py [--megabytes 1000] [--kind text|jsonl|files] [--tokenizer bytes]

The bar, for bytes on 2 cores and 1 GB: at least 20 MB/s, under 500 MB resident summed over all processes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

LEAST_MB_PER_S = 20.0
MOST_RESIDENT_MB = 500.0

PREPARE = """
import sys
from paceline.data.prepare import prepare
prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], processes=int(sys.argv[4]) or None)
"""


def paragraphs(count: int, seed: int) -> list[str]:
    """Lines of made-up words, Zipf-distributed, some of them beyond ASCII."""
    random = np.random.default_rng(seed)
    letters = [*"etaoinshrdlucmfwypvbgk", "é", "ß", "ж", "中"]
    words = ["".join(random.choice(letters, random.integers(2, 10))) for _ in range(5000)]
    lines = []
    for _ in range(count):
        picks = random.zipf(1.3, random.integers(20, 200)) % len(words)
        lines.append(" ".join(words[i] for i in picks) + ".")
    return lines


def generate(folder: Path, megabytes: int, kind: str) -> int:
    """Writes the source into ``folder``; returns its bytes."""
    lines = paragraphs(2000, seed=0)
    as_text = "\n".join(lines) + "\n"
    as_jsonl = "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines)
    block = (as_jsonl if kind == "jsonl" else as_text).encode()
    blocks = max(1, megabytes * 1_000_000 // len(block))
    if kind == "files":
        for i in range(blocks):
            for j, part in enumerate(lines[::50]):
                (folder / f"{i:05d}-{j:03d}.txt").write_text(part * 50, encoding="utf-8")
    else:
        with (folder / ("source.jsonl" if kind == "jsonl" else "source.txt")).open("wb") as file:
            for _ in range(blocks):
                file.write(block)
    return sum(path.stat().st_size for path in folder.iterdir())


def measure(source: Path, out: Path, tokenizer: str, processes: int) -> tuple[float, float, int]:
    """Seconds, peak resident MB over all processes, and how many processes there were."""
    start = time.perf_counter()
    worker = subprocess.Popen([sys.executable, "-c", PREPARE, str(source), str(out), tokenizer, str(processes)])
    me, peak, most = psutil.Process(worker.pid), 0, 0
    while worker.poll() is None:
        resident, seen = 0, 0
        for process in [me, *me.children(recursive=True)]:
            try:
                resident += process.memory_info().rss
                seen += 1
            except psutil.NoSuchProcess:
                continue
        peak, most = max(peak, resident), max(most, seen)
        time.sleep(0.05)
    if worker.returncode:
        sys.exit(f"prepare ended with exit code {worker.returncode}")
    return time.perf_counter() - start, peak / 1e6, most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--kind", choices=["text", "jsonl", "files"], default="text")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--processes", type=int, default=0, help="0: as many as prepare takes by itself")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    try:
        source = folder / "source"
        source.mkdir()
        size = generate(source, arguments.megabytes, arguments.kind)
        elapsed_s, resident_mb, processes = measure(source, folder / "out", arguments.tokenizer, arguments.processes)
    finally:
        shutil.rmtree(folder)
    mb_per_s = size / 1e6 / elapsed_s
    print(
        f"{arguments.kind}, {arguments.tokenizer}: {size / 1e6:.0f} MB in {elapsed_s:.1f} s = {mb_per_s:.1f} MB/s,"
        f" peak {resident_mb:.0f} MB resident over {processes} processes"
    )
    held = resident_mb < MOST_RESIDENT_MB and (arguments.tokenizer != "bytes" or mb_per_s >= LEAST_MB_PER_S)
    print("the bar holds" if held else f"below the bar: {LEAST_MB_PER_S:.0f} MB/s, {MOST_RESIDENT_MB:.0f} MB resident")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
