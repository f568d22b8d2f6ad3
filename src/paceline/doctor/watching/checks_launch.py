"""How the ranks were started, met and parted, and what each takes of the machine."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.watching.evidence import at, count, found, ranks
from paceline.doctor.watching.records import Record, Run

__all__ = ["CHECKS"]


def rendezvous_overridden(run: Run) -> Iterator[Finding]:
    for account in run.accounts:
        init = account.first("init")
        if init is not None and init.over and not init.failed:
            continue
        for record in account.of("env"):
            if record["key"] in ("MASTER_ADDR", "MASTER_PORT") and record["before"] not in (None, record["after"]):
                yield from found(
                    "rendezvous-overridden",
                    record.place,
                    f"{record['key']} is overwritten, so the ranks wait where nobody listens",
                    f"rank {account.rank} was told {record['key']}={record['before']}, set it to {record['after']}, "
                    f"and never came out of init_process_group ({at(init.place if init else None)})",
                )
                return


def world_size_mismatch(run: Run) -> Iterator[Finding]:
    for init in run.all("init"):
        if init["world_size"] not in (None, run.world):
            yield from found(
                "world-size-mismatch",
                init.place,
                f"init_process_group(world_size={init['world_size']}) in a run of {count(run.world, 'rank')}",
                f"{init['world_size']} ranks were waited for, {run.world} were started",
            )
            return


def spawn_under_torchrun(run: Run) -> Iterator[Finding]:
    spawns = [record for record in run.all("spawn") if (record["count"] or 1) > 1]
    if spawns and run.world > 1:
        count_each = spawns[0]["count"]
        yield from found(
            "spawn-under-torchrun",
            spawns[0].place,
            f"each of the {run.world} ranks that were started starts {count_each} more",
            f"{ranks({record.rank for record in spawns})} spawned {count_each} processes each, "
            f"{count_each * len({record.rank for record in spawns})} in all, for a world of {run.world}",
        )


def group_not_destroyed(run: Run) -> Iterator[Finding]:
    left = [end for end in run.all("end") if end["code"] == 0 and end["initialized"]]
    init = run.accounts[0].first("init")
    if left and init is not None:
        yield from found(
            "group-not-destroyed",
            init.place,
            "the process group that is made here is still there when the script ends",
            f"{ranks({end.rank for end in left})} ended without destroy_process_group",
        )


def legacy_data_parallel(run: Run) -> Iterator[Finding]:
    for record in run.all("replicated"):
        yield from found("legacy-data-parallel", record.place, "the model is wrapped in nn.DataParallel")
        return


def not_distributed(run: Run) -> Iterator[Finding]:
    steps = [account.first("step") for account in run.accounts]
    met = any(True for _ in run.all("init", "collective", "wrap", "spawn"))
    if run.world > 1 and all(step is not None for step in steps) and not met:
        taken = [sum(1 for _ in account.of("step")) for account in run.accounts]
        yield from found(
            "not-distributed",
            steps[0].place if steps[0] else None,
            f"started as {run.world} ranks, and each trains a model of its own",
            f"the ranks took {' and '.join(map(str, taken))} optimizer steps and never called init_process_group",
        )


def cuda_device_not_set(run: Run) -> Iterator[Finding]:
    """All ranks on the first GPU."""
    used = [list(account.of("device")) for account in run.accounts]
    if run.world < 2 or not all(used) or any(r["key"] == "CUDA_VISIBLE_DEVICES" for r in run.all("env")):
        return
    chosen = [{r["index"] for r in those} for those in used]
    if all(own <= {None, 0} for own in chosen):
        set_device = next((r for r in used[0] if r["how"] == "set_device"), None)
        named = "cuda:0" if 0 in chosen[0] else "cuda, without a number"
        yield from found(
            "cuda-device-not-set",
            (set_device or used[0][0]).place,
            "every rank uses the first GPU",
            f"{ranks(range(run.world))} choose device 0"
            if set_device
            else f"{ranks(range(run.world))} ask for {named}, and none chooses its own, as torch.cuda.set_device does",
        )


def loader_workers_oversubscribed(run: Run) -> Iterator[Finding]:
    cores = _cores(run)
    for loader in run.accounts[0].of("loader"):
        everywhere = all(any(r["workers"] == loader["workers"] for r in a.of("loader")) for a in run.accounts)
        if cores is not None and loader["workers"] and loader["workers"] >= cores and everywhere:
            yield from found(
                "loader-workers-oversubscribed",
                loader.place,
                "each rank starts as many loader workers as the machine has cores",
                f"{run.world} ranks with {loader['workers']} loader workers each on {count(cores, 'core')}",
            )
            return


def threads_oversubscribed(run: Run) -> Iterator[Finding]:
    cores = _cores(run)
    for record in run.accounts[0].of("threads", "env"):
        threads = record["count"] if record.kind == "threads" else _threads_of(record)
        if cores is not None and threads >= cores and run.world * threads > cores:
            yield from found(
                "threads-oversubscribed",
                record.place,
                "each rank takes as many threads as the machine has cores",
                f"{run.world} ranks with {threads} threads each on {count(cores, 'core')}",
            )
            return


def _cores(run: Run) -> int | None:
    """How many the script was told that there are, if it has asked and there are ranks that share them."""
    told = [record["value"] for record in run.all("asks") if record["what"] == "cores"]
    return max(told) if told and run.world > 1 else None


def _threads_of(record: Record) -> int:
    value = str(record["after"])
    return int(value) if record["key"] == "OMP_NUM_THREADS" and value.isdigit() else 0


CHECKS = (
    rendezvous_overridden,
    world_size_mismatch,
    spawn_under_torchrun,
    group_not_destroyed,
    legacy_data_parallel,
    not_distributed,
    cuda_device_not_set,
    loader_workers_oversubscribed,
    threads_oversubscribed,
)
