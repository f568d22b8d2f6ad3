"""Who drew the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.watching.evidence import found, ranks
from paceline.doctor.watching.records import Place, Record, Run

__all__ = ["CHECKS"]


def worker_seed_identical(run: Run) -> Iterator[Finding]:
    """Loader workers that begin alike although torch has given each of them a seed of its own, or, which may be meant,
    because all ranks were seeded alike and so drew the same seeds for theirs."""
    firsts: dict[tuple[int, int, str], Record] = {}
    for record in run.all("draw"):
        if record.child is not None:
            firsts.setdefault((record.rank, record.child, record["generator"]), record)
    alike: dict[tuple[str, str], list[Record]] = {}
    for record in firsts.values():
        alike.setdefault((record["generator"], record["state"]), []).append(record)
    loader = next((r for r in run.accounts[0].of("loader") if r["workers"]), None)
    place = loader.place if loader is not None else None
    path, first_line, last_line = (loader["seeding"] if loader is not None else None) or ("", 0, -1)
    seeding = [Place(path, line) for line in range(first_line, last_line + 1)]
    reseeded = next((those for those in alike.values() if len({r["seed"] for r in those}) > 1), None)
    shared = next((those for those in alike.values() if len({r.rank for r in those}) == run.world > 1), None)
    if reseeded is not None:
        generator = reseeded[0]["generator"]
        yield from found(
            "worker-seed-identical",
            place,
            f"loader workers draw the same numbers from {generator}",
            f"torch had seeded {len(reseeded)} workers of {ranks({r.rank for r in reseeded})} differently, "
            f"and all of them began with {generator}'s generator in the same state",
            also=seeding,
        )
    elif shared is not None:
        yield from found(
            "worker-seed-identical",
            place,
            f"loader workers of all ranks draw the same numbers from {shared[0]['generator']}",
            f"{ranks({r.rank for r in shared})} were seeded alike, and so are their loader workers",
            severity="advice",
            also=[*seeding, *_seeded(run)],
        )


def rng_identical_across_ranks(run: Run) -> Iterator[Finding]:
    """The same state before a draw on all ranks."""
    draws = [[r for r in account.of("draw") if r.child is None] for account in run.accounts]
    if run.world < 2 or not all(draws):
        return
    common = set.intersection(*({(r["generator"], r["state"]) for r in own} for own in draws))
    same = [r for r in draws[0] if (r["generator"], r["state"]) in common]
    if same:
        first = same[0]
        what = "dropout and the like" if first["where"] == "forward" else "the dataset"
        yield from found(
            "rng-identical-across-ranks",
            first.place,
            f"{what} draw the same random numbers on every rank",
            f"{ranks(range(run.world))}: {first['generator']}'s generator was in the same state before "
            f"{len(same)} of {len(draws[0])} draws that were looked at",
            also=_seeded(run),
        )


def _seeded(run: Run) -> list[Place]:
    """The lines from which rank 0 seeded torch."""
    return [place for record in run.accounts[0].of("seed") for place in record.places]


CHECKS = (worker_seed_identical, rng_identical_across_ranks)
