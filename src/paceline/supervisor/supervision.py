"""One team of workers, from its start to the end of its last worker: watched, mended, handed signals."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_POISONED, EXIT_PREEMPTED, PacelineError
from paceline.events import warn
from paceline.link import decode, encode
from paceline.pulse import read_pulse
from paceline.supervisor.deaths import Death, Deaths
from paceline.supervisor.endings import STOPS, Ending, Outcome, conclude
from paceline.supervisor.handed import HandedSignals
from paceline.supervisor.hangs import Hangs, Suspect
from paceline.supervisor.job import Job, Worker
from paceline.supervisor.processes import Process, Template
from paceline.supervisor.record import Record
from paceline.supervisor.roster import Roster

__all__ = ["Supervision"]

_GRACE_S = 3.0
"""After a failure the other workers have this long to end by themselves and say so."""
_STOPPING_S = 10.0
"""After a signal workers end together; one that is left alone, such as in the middle of joining, is not waited for."""
_VERDICT_S = 5.0
"""Members that cannot reach each other though all of them live are told to meet anew after so long."""
_TICK_S = 0.05
_LOOK_S = 0.25
_REFORMS = 3
_REPLACEMENTS = 3
"""Without one of them having come in."""
_MESSAGE_BYTES = 1 << 16
_ASKING: dict[int, int] = {
    signal.SIGTERM: EXIT_PREEMPTED,
    signal.SIGUSR1: EXIT_PREEMPTED,
    signal.SIGINT: EXIT_INTERRUPTED,
}
"""Signals by which a worker is asked to stop, and with which exit code."""


class Supervision:
    """Runs ``job`` until all workers have ended.

    Args:
        store: served on this listening socket to the workers; ``None`` for one worker.
        signals: what this process has been sent meanwhile.

    Attributes:
        begin_again: why all that is left of the team had to be ended, to start again from the newest checkpoint.
    """

    def __init__(
        self, job: Job, template: Template, store: socket.socket | None, signals: HandedSignals, deaths: Deaths
    ) -> None:
        self._job, self._template, self._listener, self._signals, self._deaths = job, template, store, signals, deaths
        self._port = store.getsockname()[1] if store is not None else 1
        self._store: Process | None = None
        self._workers: dict[int, Worker] = {}
        self._roster = Roster(range(job.workers), job.cause, job.began_s)
        self._on_loss = "replace" if job.is_run else None
        self._run_dir: Path | None = None
        self._hangs = Hangs(None, 600.0)
        self._undecided: list[Worker] = []
        self._deadline: float | None = None
        self._stopping: int | None = None
        self._handed_on: set[signal.Signals] = set()
        self._asked: set[int] = set()
        self._asked_to_begin_again: str | None = None
        self._runs = 0
        self._failing = False
        self._poison: PacelineError | None = None
        self._looked_s = 0.0
        self._reforms = 0
        self._unreachable_s: float | None = None
        self._replacements = 0
        self._empty_slots: list[int] = []
        self._record = Record(job)
        self.begin_again: str | None = None

    @property
    def furthest(self) -> int:
        """The furthest step that a worker has come to."""
        return self._hangs.furthest

    def run(self) -> Outcome:
        """Returns how they ended; with `begin_again` set that is not the end of the job."""
        try:
            for slot in range(self._job.workers):
                self._start(slot)
            self._note_members()
            self._serve_store()  # beside the workers
            while any(worker.code is None for worker in self._workers.values()):
                self._turn()
        finally:
            for worker in self._workers.values():
                if worker.code is None:
                    worker.process.kill_group(signal.SIGKILL)
            for worker in self._workers.values():
                worker.process.reap()
            if self._store is not None:
                self._store.kill_group(signal.SIGKILL)
                self._store.reap()
        return self._outcome()

    # What happens

    def _turn(self) -> None:
        self._hand_on_signals()
        alive = {worker.process.link.fileno(): worker for worker in self._workers.values() if worker.code is None}
        poll = select.poll()
        for descriptor, worker in alive.items():
            poll.register(descriptor, select.POLLIN)
            poll.register(worker.process.pidfd, select.POLLIN)
        for descriptor, _ in poll.poll(_TICK_S * 1000):
            if descriptor in alive:
                self._hear(alive[descriptor])
        for worker in alive.values():
            code = worker.process.ended()
            if code is not None:
                self._hear(worker)  # its last words
                self._take_end(worker, code)
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._template.revive()
            self._serve_store()
            self._look_for_hangs()
        self._start_replacements()
        if self._asked_to_begin_again is not None:  # after the ends of this turn: it may follow from a failure
            self._begin_again(self._asked_to_begin_again)
        if self._unreachable_s is not None and now_s > self._unreachable_s + _VERDICT_S:
            self._mend(now_s)
        if self._deadline is not None and now_s > self._deadline:
            self._end_undecided()
            self._kill_all()
        if all(w.code is not None or not self._roster.is_member(w.member) for w in self._workers.values()):
            self._dismiss_replacements()
        self._record.write(self._run_dir)
        self._send()

    def _hear(self, worker: Worker) -> None:
        """Takes what a worker has said."""
        while True:
            try:
                message = worker.process.link.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                continue  # it ended with words of ours unheard; its own come now
            except OSError:
                return
            if not message:
                return
            self._take(worker, *decode(message))

    def _take(self, worker: Worker, kind: str, fields: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if kind == "hello":
            self._take_hello(worker, fields)
        elif kind == "ready":
            self._roster.ready(worker.member, fields["number"])
        elif kind == "met":
            formed, worker.met = self._roster.formed, True
            self._roster.met(worker.member, fields["number"])
            if self._roster.formed and not formed:
                self._unreachable_s, self._reforms = None, 0
                self._note_members()
        elif kind == "lost":
            if fields["number"] == self._roster.generation.number:
                self._unreachable_s = self._unreachable_s or now_s
        elif kind == "wait":
            self._replacements = 0
            self._roster.wait(worker.member)
        elif kind == "unwait":
            self._roster.unwait(worker.member)
        elif kind == "admit":
            self._roster.admit(fields["number"], now_s=now_s)
        elif kind == "stop":
            self._stop(fields["exit_code"])
        elif kind == "restart":
            self._asked_to_begin_again = fields["why"]
        elif kind == "bye":
            worker.bye = True
            self._roster.bye(worker.member)
        elif kind == "over":
            worker.over = fields["exit_code"]

    def _take_hello(self, worker: Worker, fields: dict[str, Any]) -> None:
        """A run begins in ``worker``: the first one of its program, or another."""
        worker.hello, worker.bye = True, False
        worker.runs += 1
        self._roster.hello(worker.member)
        if worker.runs > self._runs:  # it is the first of all workers
            self._runs = worker.runs
            self._on_loss = fields["on_loss"]
            self._run_dir = Path(fields["run_dir"]) if fields["run_dir"] else None
            self._hangs = Hangs(fields["hang_after_s"], fields["timeout_s"], self.furthest)
        if self._roster.several_runs:
            self._dismiss_replacements()
        self._refuse_without_run()
        undecided, self._undecided = self._undecided, []
        if undecided:
            self._deadline = None
        for lost in undecided:
            self._take_loss(lost)

    def _take_end(self, worker: Worker, code: int) -> None:
        if code < 0 and worker.over is not None and (worker.bye or not worker.hello):
            code = worker.over  # it had done all, but for the end of the interpreter
        worker.code, worker.ended = code, time.time()
        answered = code in self._answers()
        if code not in STOPS:
            worker.process.kill_group(signal.SIGKILL)  # forked children hold its connections open
        if worker.by_us and not self._roster.is_member(worker.member):
            worker.lost = True  # a replacement that nobody needed
        elif self._failing or self.begin_again is not None:
            # What the others fail of is no echo of it: they would have gone on without it.
            worker.lost = code < 0 and worker.hello and self._on_loss != "stop" and self._poison is None
        elif answered:
            if self._stopping is not None:
                self._deadline = self._deadline or time.monotonic() + _STOPPING_S
            if worker.hello and not worker.bye and code == EXIT_DONE and self._stopping is None:
                self._fail_early(worker)
            else:
                self._roster.left(worker.member, now_s=time.monotonic())
                self._refuse_without_run()
        elif code < 0:
            if -code in _ASKING and worker.told is None and self._on_loss not in (None, "stop"):
                self._asked.add(-code)  # before it had a handler: the others answer for it
                self._stop(_ASKING[-code])
            self._take_loss(worker)
        elif worker.member >= self._job.workers and not worker.met:
            self._give_up_replacement(worker)
        else:
            self._fail(f"worker {self._rank(worker)} failed")

    def _answers(self) -> set[int]:
        """Exit codes of a worker that has not failed: once they are to stop, also by the signal that told them to."""
        stopping = set() if self._stopping is None else {self._stopping}
        return STOPS | stopping | {-number for number in (*self._handed_on, *self._asked)}

    def _take_loss(self, worker: Worker) -> None:
        """A worker died by a signal."""
        assert worker.code is not None
        beat = read_pulse(worker.pulse)
        self._hangs.saw(beat)
        death = Death.of(self._rank(worker), -worker.code, beat, worker.told, self._deaths)
        now_s, cause, member = time.monotonic(), death.cause, self._roster.is_member(worker.member)
        others = [w for w in self._workers.values() if w.code is None and self._roster.is_member(w.member)]
        if self._on_loss is None and not any(other.hello for other in self._workers.values()):
            self._undecided.append(worker)  # perhaps this program makes no run, and cannot go on
            self._deadline = self._deadline or now_s + _GRACE_S
        elif death.poisoned is not None:
            self._poison = death.poisoned
            self._fail(cause)
        elif self._on_loss == "stop" and member:
            self._fail(cause)
        elif not member:
            self._give_up(worker, cause, now_s)
            self._replace(worker)
        elif worker.bye:
            self._fail(cause)  # behind its run, where nobody can do its work again
        elif any(w.bye for w in self._workers.values()) and all(w.bye for w in others):
            self._give_up(worker, cause, now_s)  # the others have come to the end already
        elif not others or self._on_loss == "restart" or self._roster.apart:
            self._record.died(worker, self._rank(worker), cause)
            self._begin_again(cause)
        else:
            self._record.died(worker, self._rank(worker), cause)
            self._give_up(worker, cause, now_s - worker.idle_s)
            self._replace(worker)

    # What is done

    def _start(self, slot: int) -> None:
        member = len(self._workers)
        environ = env.for_worker(
            member,
            slot,
            self._job.workers,
            port=self._port,
            report_dir=self._job.folder,
            restarts=self._job.restarts,
        )
        process = self._template.start(self._job.words, environ, self._job.output)
        self._workers[member] = Worker(member, slot, process, self._job.folder / f"pulse-{member}")

    def _give_up(self, worker: Worker, cause: str, now_s: float) -> None:
        """The others go on without it."""
        worker.lost, self._unreachable_s = True, None
        self._roster.gone(worker.member, cause, now_s=now_s)
        self._send()  # the others first
        worker.process.reap()

    def _replace(self, worker: Worker) -> None:
        """Starts another in its slot, unless nothing is to be gained by it."""
        if self._on_loss != "replace" or self._roster.several_runs or self._stopping is not None:
            return
        self._replacements += 1
        if self._replacements > _REPLACEMENTS * self._job.workers:
            warn("no replacement has come in; the others go on alone")
            return
        self._empty_slots.append(worker.slot)

    def _give_up_replacement(self, worker: Worker) -> None:
        """It failed before it came in: the others are none the worse, and the next one would fail alike."""
        report = self._ending(worker).report
        warn(f"a replacement could not come in: {report['message'] if report else 'it ended'} The others go on alone.")
        self._give_up(worker, "", time.monotonic())
        self._on_loss = "shrink"

    def _start_replacements(self) -> None:
        """Once the template is ready: one that was killed itself takes seconds to import torch again."""
        while self._empty_slots and self._template.ready:
            if self._stopping is not None or self._failing or self.begin_again is not None:
                return
            try:
                self._start(self._empty_slots.pop())
            except PacelineError as error:
                warn(f"{error} The others go on alone.")

    def _serve_store(self) -> None:
        """A store that was killed is needed for the next meeting only: the next one serves on the same address."""
        if self._listener is None or (self._store is not None and self._store.ended() is None):
            return
        if self._store is None:
            self._store = self._template.start_store(self._listener)
        elif self._template.ready:
            self._store.reap()
            with contextlib.suppress(PacelineError):  # tried again at the next look
                self._store = self._template.start_store(self._listener)

    def _look_for_hangs(self) -> None:
        members = [w for w in self._workers.values() if w.hello and not w.bye and w.code is None]
        watched = [
            Suspect(
                id=w.member,
                rank=self._rank(w),
                process=w.process,
                pulse=w.pulse,
                stacks=self._job.folder / f"stacks-{w.member}",
                ask=functools.partial(self._tell, w, "stacks"),
            )
            for w in members
            if self._roster.is_member(w.member) and w.told is None
        ]
        hang = self._hangs.look(watched)
        if hang is not None and not self._failing and self.begin_again is None:
            worker = self._workers[hang.id]
            worker.told, worker.idle_s = self._hangs.tell(hang, watched, self._run_dir), hang.elapsed_s
            worker.process.kill_group(signal.SIGKILL)  # from now on it is a loss like any other

    def _mend(self, now_s: float) -> None:
        """Members that live cannot reach each other."""
        self._unreachable_s = None
        self._reforms += 1
        if self._reforms > _REFORMS:
            self._fail("the workers cannot reach each other, though all of them are alive")
        else:
            self._roster.reform("the workers lost touch with each other", now_s=now_s)

    def _begin_again(self, why: str) -> None:
        if self._failing:
            return
        if self._stopping is None:
            self.begin_again = why
        else:
            self._fail(why)
        self._kill_all()

    def _fail(self, told: str) -> None:
        """The run ends. Who waits for the others is told so; all have a moment to say what they know."""
        self._failing = True
        self._deadline = self._deadline or time.monotonic() + _GRACE_S
        for worker in self._workers.values():
            if worker.code is None and worker.hello:
                self._tell(worker, "end", told=f"{told}.")

    def _fail_early(self, worker: Worker) -> None:
        worker.early = True
        self._fail(f"worker {self._rank(worker)} has ended in the middle of the run")

    def _refuse_without_run(self) -> None:
        """A program that makes a run on some workers, and has ended without one on another."""
        if any(worker.hello for worker in self._workers.values()):
            for worker in self._workers.values():
                if worker.code == EXIT_DONE and not worker.hello and self._stopping is None:
                    self._fail_early(worker)

    def _end_undecided(self) -> None:
        for worker in self._undecided:
            self._fail(worker.told or f"worker {worker.slot} was killed")
        self._undecided = []

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            if worker.code is None:
                worker.by_us = True
                worker.process.kill_group(signal.SIGKILL)

    def _hand_on_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGTSTP:  # Ctrl-Z: stop all, and go on together
                self._signal_all(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._signal_all(signal.SIGCONT)
            elif self._handed_on:
                warn("ended at once by a second signal: what there is to go on from is the newest checkpoint before it")
                self._kill_all()
            else:
                self._handed_on.add(number)
                self._signal_all(number)
                self._stop(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED)

    def _stop(self, exit_code: int) -> None:
        """All are asked to save and stop."""
        self._stopping = self._stopping or exit_code
        self._dismiss_replacements()
        for worker in self._workers.values():
            if worker.code is None and worker.hello:
                self._tell(worker, "stop", exit_code=exit_code)

    def _dismiss_replacements(self) -> None:
        """Those that nobody will let in."""
        self._empty_slots = []
        for worker in self._workers.values():
            if worker.code is None and not self._roster.is_member(worker.member):
                worker.by_us = True
                worker.process.kill_group(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            if worker.code is None:
                worker.process.signal(number)

    def _send(self) -> None:
        outbox, self._roster.outbox = self._roster.outbox, []
        for member, kind, fields in outbox:
            if self._workers[member].code is None:
                self._tell(self._workers[member], kind, **fields)

    def _tell(self, worker: Worker, kind: str, **fields: object) -> None:
        try:
            worker.process.link.send(encode(kind, **fields), socket.MSG_DONTWAIT)
        except OSError:  # it is about to end
            return

    # What is known

    def _rank(self, worker: Worker) -> int:
        """Its place when the team last met: in one moment several may be lost, and the others move up."""
        return worker.rank if worker.rank is not None else worker.slot

    def _note_members(self) -> None:
        """The team has met."""
        for rank, member in enumerate(self._roster.generation.members):
            self._workers[member].rank = rank
        self._record.met(self._roster.generation, self._workers)

    def _outcome(self) -> Outcome:
        endings = [self._ending(worker) for worker in self._workers.values() if not worker.lost]
        members = tuple(member for member in self._roster.finishers if not self._workers[member].lost)
        outcome = conclude(sorted(endings, key=lambda ending: ending.order), self._answers())
        if self._poison is not None:
            outcome = Outcome(exit_code=EXIT_POISONED, failure=f"paceline: error: {self._poison}")
        return dataclasses.replace(outcome, members=members)

    def _ending(self, worker: Worker) -> Ending:
        code = EXIT_FAILED if worker.early else worker.code
        assert code is not None
        if self._stopping is not None and (worker.by_us or (code < 0 and code in self._answers())):
            code = self._stopping  # before it could answer better
        path = self._job.folder / f"worker-{worker.member}.json"
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return Ending(self._rank(worker), code, worker.ended, worker.by_us, report, worker.told, worker.early)
