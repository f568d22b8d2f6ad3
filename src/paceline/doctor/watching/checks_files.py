"""What the ranks wrote, read, fetched and printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.findings import Finding
from paceline.doctor.watching.evidence import at, count, found, ranks
from paceline.doctor.watching.records import Place, Record, Run
from paceline.doctor.watching.sources import line_of

__all__ = ["CHECKS"]


_SAYS_WHO = re.compile(r"rank|worker|process|\bpid|gpu|cuda|device|\bnode|\bhost", re.I)
"""A line that tells whose it is may come from every rank."""


def _by(run: Run, kind: str, fact: str) -> dict[str, dict[int, list[Record]]]:
    """Records of a kind by a fact of theirs and by rank."""
    grouped: dict[str, dict[int, list[Record]]] = {}
    for record in run.all(kind):
        if record[fact]:
            grouped.setdefault(record[fact], {}).setdefault(record.rank, []).append(record)
    return grouped


def save_on_all_ranks(run: Run) -> Iterator[Finding]:
    told = set()
    for path, by_rank in _by(run, "save", "path").items():
        first = next(iter(by_rank.values()))[0]
        if len(by_rank) > 1 and first.place not in told:
            told.add(first.place)
            yield from found(
                "save-on-all-ranks",
                first.place,
                f"every rank writes {Path(path).name}",
                f"{ranks(by_rank)} saved to the same path {path}",
            )


def other_files_on_all_ranks(run: Run) -> Iterator[Finding]:
    """Any other file that several ranks open for writing, or that one reads while another may still write it."""
    saved = {record["path"] for record in run.all("save", "lock")}  # a file that is locked is there to be locked
    reads = _by(run, "read", "path")
    for path, by_rank in _by(run, "open", "path").items():
        if path in saved:
            continue
        writers = {rank: [r for r in those if r["mode"] == "write"] for rank, those in by_rank.items()}
        writers = {rank: those for rank, those in writers.items() if those and those[0]["own"]}
        unmet = [
            (writer, reader)
            for rank, those in writers.items()
            for writer in those[:1]
            for other, readers in reads.get(path, {}).items()
            for reader in readers[:1]
            if other != rank and other not in writers and _unmet(writer, reader) and reader.at_s >= writer.at_s
        ]
        if len(writers) > 1:
            first = min((those[0] for those in writers.values()), key=lambda record: record.at_s)
            yield from found(
                "download-on-all-ranks" if reads.get(path) else "save-on-all-ranks",
                first.place,
                f"every rank writes {Path(path).name}",
                f"{ranks(writers)} opened the same path {path} for writing",
            )
        elif unmet:
            writer, reader = unmet[0]
            yield from found(
                "download-on-all-ranks",
                writer.place,
                f"{Path(path).name} is written here while another rank may read it already",
                f"rank {reader.rank} opened it ({at(reader.place)}) {reader.at_s - writer.at_s:.2f} s after rank "
                f"{writer.rank} had begun to write, without having met it in between",
            )


def _unmet(writer: Record, reader: Record) -> bool:
    """Whether a reader may come before a writer is done: they have not met in between. One that read before it met the
    writer the last time, a state to resume from, does not."""
    return reader.syncs == writer.syncs or (reader.syncs < writer.syncs and reader.at_s >= writer.at_s)


def download_on_all_ranks(run: Run) -> Iterator[Finding]:
    for url, by_rank in _by(run, "download", "url").items():
        first = next(iter(by_rank.values()))[0]
        if len(by_rank) > 1:
            yield from found(
                "download-on-all-ranks", first.place, "every rank downloads the same thing", f"{ranks(by_rank)}: {url}"
            )


def load_without_barrier(run: Run) -> Iterator[Finding]:
    saves = _by(run, "save", "path")
    for path, by_rank in _by(run, "load", "path").items():
        for writer in (record for those in saves.get(path, {}).values() for record in those):
            others = (record for rank, those in by_rank.items() if rank != writer.rank for record in those)
            early = [record for record in others if _unmet(writer, record)]
            if early and early[0].rank not in saves[path]:
                yield from found(
                    "load-without-barrier",
                    early[0].place,
                    f"{Path(path).name} is loaded while another rank may still be writing it",
                    f"rank {writer.rank} saves it ({at(writer.place)}); {ranks({r.rank for r in early})} "
                    "loaded it without having met that rank in between",
                )
                return


def load_without_map_location(run: Run) -> Iterator[Finding]:
    """Only of a script that asks for GPUs; what it does not give to a model may be data."""
    gpus = any(record["what"] == "gpus" for record in run.all("asks"))
    loads = [record for record in run.all("load") if not record["mapped"]]
    if gpus and len({record.rank for record in loads}) > 1:
        yield from found(
            "load-without-map-location",
            loads[0].place,
            "torch.load without map_location, in a script that uses GPUs where there are some",
            f"{ranks({record.rank for record in loads})} load it",
            severity=None if _states_after(run, loads[0]) else "advice",
            confidence="likely",
        )


def _states_after(run: Run, load: Record) -> bool:
    return any(record.at_s >= load.at_s for record in run.accounts[load.rank].of("load-state"))


def module_prefix_checkpoint(run: Run) -> Iterator[Finding]:
    """Only where a plain model was given such keys: what is loaded into the wrapper again is right."""
    for load in run.all("load-state"):
        if load["lost"]:
            save = next((record for record in run.all("save") if record["prefixed"]), None)
            outcome = "took none of them" if load["whole"] else "refused them"
            yield from found(
                "module-prefix-checkpoint",
                save.place if save is not None else load.place,
                "the state dict of the DDP itself is saved, not of the model inside"
                if save is not None
                else "keys with DDP's `module.` in front are loaded into a plain model",
                f"a plain model was given keys that begin with `module.` ({at(load.place)}), and {outcome}",
            )
            return


def tracker_on_all_ranks(run: Run) -> Iterator[Finding]:
    trackers = list(run.all("tracker"))
    for first in trackers[:1]:
        same = [r for r in trackers if r.place == first.place and r["where"] == first["where"]]
        if len({record.rank for record in same}) > 1:
            yield from found(
                "tracker-on-all-ranks",
                first.place,
                f"every rank starts {first['name'].removesuffix('.__init__')}",
                f"started by {ranks({record.rank for record in same})}",
            )


def print_on_all_ranks(run: Run) -> Iterator[Finding]:
    """Lines that come from every rank, unless they say which."""
    by_place: dict[Place | None, dict[int, list[Record]]] = {}
    for record in run.all("print"):
        by_place.setdefault(_asked_for(record), {}).setdefault(record.rank, []).append(record)
    for place, by_rank in by_place.items():
        first = next(iter(by_rank.values()))[0]
        said = f"{line_of(place)} {first['text']}"
        if len(by_rank) < run.world or run.world < 2 or _SAYS_WHO.search(said):
            continue
        lines = min(len(those) for those in by_rank.values())
        yield from found(
            "print-on-all-ranks",
            place,
            "every rank prints this",
            f"{count(lines, 'line')} from each of {run.world} ranks, such as {first['text'][:60]!r}",
            severity=None if lines > 1 else "advice",
        )


def _asked_for(record: Record) -> Place | None:
    """The line that wants it printed. One that hands on what it was given, ``print(*args)``, does so for another."""
    wanting = (place for place in record.places if not re.search(r"\(\*\w+", line_of(place)))
    return next(wanting, record.place)


CHECKS = (
    save_on_all_ranks,
    other_files_on_all_ranks,
    download_on_all_ranks,
    load_without_barrier,
    load_without_map_location,
    module_prefix_checkpoint,
    tracker_on_all_ranks,
    print_on_all_ranks,
)
