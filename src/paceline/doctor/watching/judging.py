"""From what the ranks have told to what is wrong with the script."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.doctor.causes import BREAKS, MEETING
from paceline.doctor.findings import Finding, Obeyed
from paceline.doctor.rules import RULES
from paceline.doctor.watching import (
    checks_collectives,
    checks_data,
    checks_errors,
    checks_files,
    checks_gradients,
    checks_launch,
    checks_models,
    checks_random,
    checks_replicas,
)
from paceline.doctor.watching.evidence import at, count
from paceline.doctor.watching.guarded import guarded
from paceline.doctor.watching.obeying import RULES_OBEYED
from paceline.doctor.watching.records import Account, Record, Run
from paceline.doctor.watching.sources import line_of

__all__ = ["Verdict", "judge", "may_need_gpus", "wants_gpus"]

_FAMILIES = (
    checks_launch,
    checks_data,
    checks_random,
    checks_models,
    checks_gradients,
    checks_replicas,
    checks_files,
    checks_collectives,
)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run comes to.

    Args:
        findings: all that it shows, in the order of the checks; what explains what is not asked here.
        obeyed: rules that it has exercised and seen obeyed.
        notes: what it could not show, and why.
        cannot: why it shows nothing at all, the one of the notes that says so; ``None``: it does.
    """

    findings: tuple[Finding, ...]
    obeyed: tuple[Obeyed, ...]
    notes: tuple[str, ...]
    cannot: str | None = None


def judge(run: Run) -> Verdict:
    """What the records show. Whatever is missing in them, or wrong with a check: the others are heard all the same."""
    notes: list[str] = []
    checks = [check for family in _FAMILIES for check in family.CHECKS]
    if _dropped(run):  # and each rank at another place, perhaps
        checks = [check for check in checks if check not in checks_collectives.CHECKS]
    found = [finding for check in checks for finding in _heard(check, run, notes)]
    failures = [finding for check in checks_errors.CHECKS for finding in _heard(check, run, notes)]
    obeyed = [rule for check in RULES_OBEYED for rule in _heard(check, run, notes)]
    told = [note for say in (guarded, _limits) for note in _heard(say, run, notes)]
    verdict = tuple(_once(_broken(found, failures)))
    cannot = next(_heard(_cannot, run, notes), None)
    if run.stopped == "hang" and any(finding.id in MEETING or finding.broke_s is not None for finding in verdict):
        cannot = None  # it is known why, and told
    return Verdict(
        findings=verdict,
        obeyed=tuple(obeyed),
        notes=tuple(dict.fromkeys([*told, *notes, *([cannot] if cannot else [])])),
        cannot=cannot,
    )


def _heard(check: Callable[[Run], Iterable[_T]], run: Run, notes: list[str]) -> Iterator[_T]:
    """What a check finds; one that raises is a note, and no reason to be silent on the rest."""
    try:
        yield from check(run)
    except Exception as error:
        name = check.__name__.replace("_", "-")
        rule = f"rule {name}" if name in RULES else f"what {check.__module__.rpartition('.')[2]} asks ({name})"
        notes.append(f"{rule} could not be judged: {type(error).__name__}: {error}")


def _broken(found: list[Finding], failures: list[Finding]) -> Iterator[Finding]:
    """Each mistake with the time from when on the ranks could not meet because of it: since torch has raised, or from
    its beginning. Of what an exception and a record tell, the record has the place."""
    since = {failure.id: failure.span[0] for failure in reversed(failures) if failure.span is not None}
    for finding in found:
        if finding.id in since:
            yield replace(finding, broke_s=since[finding.id])
        elif finding.id in BREAKS:
            yield replace(finding, broke_s=finding.span[0] if finding.span is not None else 0.0)
        else:
            yield finding
    told = {finding.id for finding in found}
    yield from (replace(failure, broke_s=since.get(failure.id)) for failure in failures if failure.id not in told)


def _once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Of each rule and line the first."""
    seen: set[tuple[str, str, int]] = set()
    for finding in findings:
        place = (finding.id, finding.path, finding.line)
        if place not in seen:
            seen.add(place)
            yield finding


def _cannot(run: Run) -> Iterator[str]:
    """Why finding nothing would mean nothing, if it would."""
    if run.stopped == "hang":
        yield f"no rank made any progress: {'; '.join(map(_stands, run.accounts))}"
    failure = _failure(run)
    if failure is not None and run.stopped in ("failed", "ended"):  # at whatever step: it did not train
        yield failure
    if run.stopped == "steps" or any(True for _ in run.all("step")):
        return
    if run.stopped == "spawned":
        replaced = any(account.told["exec"] for account in run.accounts)
        does = "replaces its process by another program (os.exec)" if replaced else "starts processes of its own"
        yield f"the script {does}, into which the doctor does not look"
    elif run.stopped == "time":
        yield "time was up before the first optimizer step; --timeout gives more"
    elif failure is None and not any(True for _ in run.all("end")):
        yield "the ranks left by os._exit or the like, before their first optimizer step"
    elif _did_not_train(run):
        yield "the script came to its end without a process group and without an optimizer step: it did not train"


def _did_not_train(run: Run) -> bool:
    """Whether all ranks came to their end and nothing that belongs to training was done on the way."""
    done = any(True for _ in run.all("step", "init", "wrap", "collective"))
    return run.stopped == "ended" and not done and _failure(run) is None


def _limits(run: Run) -> Iterator[str]:
    """What a run that has shown something has not shown."""
    if (fault := next(run.all("fault"), None)) is not None:
        yield f"a part of the doctor itself failed in rank {fault.rank}, and looked no further: {fault['text']}"
    if long := sum(1 for account in run.accounts for record in account.records if record["cut"]):
        yield f"the ranks gave {count(long, 'report')} too long to be kept whole: not all rules could be judged"
    if dropped := _dropped(run):
        yield (
            f"the ranks told more than is kept: {count(dropped, 'report')} after the first ones were not looked at, "
            "and it was not compared who meets whom"
        )
    taken = min(sum(1 for _ in account.of("step")) for account in run.accounts)
    if run.stopped == "ended" and not taken and _failure(run) is None:
        yield "no optimizer step was seen on every rank: the rules about training had nothing to look at"
    if run.stopped == "steps":
        yield f"the run was ended after {taken} optimizer steps on each rank (--steps)"
    elif run.stopped == "time" and taken:
        yield f"the run was ended when time was up, after {taken} optimizer steps (--timeout)"
    elif run.stopped in ("failed", "ended") and (failure := _failure(run)) is not None:
        yield failure


def _dropped(run: Run) -> int:
    return sum(account.dropped for account in run.accounts)


def _failure(run: Run) -> str | None:
    """Who failed first, and of what."""
    failure = checks_errors.first_failure(run)
    if failure is None:
        return None
    account, error = failure
    if error is not None and checks_errors.is_echo(error):
        return f"rank {account.rank} lost its connection to a rank that had ended, or was elsewhere"
    where = f" at {error.place.path}:{error.place.line}" if error is not None and error.place is not None else ""
    others = [own.first("error") for own in run.accounts]
    alike = error is not None and all(
        o is not None and (o["type"], o.place) == (error["type"], error.place) and not checks_errors.is_echo(o)
        for o in others
    )
    who = "all ranks failed" if alike else f"rank {account.rank} failed first"
    return f"{who}{where}: {_reason(account, error)}"


def _reason(account: Account, error: Record | None) -> str:
    text = _without_traceback(str(error["text"] or "").strip())[:300] if error is not None else ""
    if error is not None and not (error["type"] == "SystemExit" and text.isdigit()):
        says = text or line_of(error.place)  # of a bare assertion, all there is
        return f"{error['type'] or 'an exception'}: {says}" if says else str(error["type"] or "an exception")
    code = int(text) if text else account.code or 0
    how = f"killed by signal {-code}" if code < 0 else f"it left with exit code {code}"
    if code == -signal.SIGKILL:  # the doctor sends none before a rank has failed
        how += " (SIGKILL), as the kernel does when memory runs out"
    last = account.tail.strip().rpartition("\n")[2][:200]
    return f"{how}; its last line: {last}" if last else how


def _without_traceback(text: str) -> str:
    """What an exception says that hands on another one, as of a loader worker: its first line and what it ends with."""
    lines = text.splitlines()
    return f"{lines[0]} ... {lines[-1]}" if "Traceback (most recent call last)" in text else text


def _stands(account: Account) -> str:
    if account.ended_s is not None:
        return f"rank {account.rank} has come to its end"
    wait = account.waiting()
    where = account.stands or at(wait.place if wait is not None else None)
    return f"rank {account.rank} stands at {where}"


def may_need_gpus(run: Run) -> bool:
    """Whether it is worth running again as if there were GPUs."""
    return wants_gpus(run) or _did_not_train(run)


def wants_gpus(run: Run) -> bool:
    """Whether it gave up before its first step because there is no GPU."""
    failure = checks_errors.first_failure(run)
    if failure is None or any(True for _ in run.all("step")):
        return False
    account, error = failure
    said = f"{error['text']} {line_of(error.place)}" if error is not None else account.tail
    return re.search(r"cuda|gpu|nccl|torch\.accelerator", said, re.I) is not None
