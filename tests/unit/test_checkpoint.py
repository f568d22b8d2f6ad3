"""The store: what is kept, what is passed over, what is refused, and saving in the background."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoint import Loaded, Saved, Snapshot, Store, Writer, compare_keys
from paceline.checkpoint.disk import locked
from paceline.checkpoint.manifest import DamageError, FileEntry, Manifest, Name, parse, verify
from paceline.config import Identity
from paceline.errors import CheckpointError

IDENTITY = Identity.of({"recipe": {"seed": 0, "steps": 500}})


def snapshot(step: int, **metrics: float) -> Snapshot:
    states = {
        "model": {"weight": torch.full((5, 3), float(step)), "bias": torch.zeros(5)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }
    return Snapshot.take(step=step, states=states, position={"step": step, "best": float("inf")}, metrics=metrics)


def assert_whole(loaded: Loaded | None, step: int) -> Loaded:
    assert loaded is not None
    assert loaded.step == step
    assert torch.equal(loaded.states["model"]["weight"], torch.full((5, 3), float(step)))
    assert loaded.states["optimizer"]["state"][0]["step"].item() == step
    assert loaded.position == {"step": step, "best": float("inf")}
    return loaded


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def damage(store: Store, name: str) -> None:
    (store.directory / name / "state.json").write_bytes(b"{}")


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: to force bytes to a disk takes 10 ms a file, and we save often."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as directory:
        yield Path(directory)


@pytest.fixture
def store(ram: Path) -> Store:
    return Store(ram / "run" / "checkpoints")


# What a checkpoint is


def test_nothing_saved_is_nothing_loaded(store: Store) -> None:
    assert store.load(IDENTITY) is None
    store.directory.mkdir(parents=True)
    assert store.load(IDENTITY) is None


def test_a_checkpoint_comes_back_and_plain_tools_read_it(store: Store) -> None:
    path = store.save(snapshot(200, loss=1.5, worst=float("inf")), IDENTITY)
    assert path == store.directory / "step-00000200"
    loaded = assert_whole(Store(store.directory).load(IDENTITY), 200)
    assert loaded.metrics == {"loss": 1.5, "worst": float("inf")}
    assert loaded.path == path
    assert loaded.passed_over == []
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["identity"] == {"digest": IDENTITY.digest, "fields": dict(IDENTITY.fields)}
    assert set(manifest["versions"]) == {"paceline", "torch", "python"}
    assert set(manifest["files"]) == {"model.safetensors", "optimizer.safetensors", "state.json"}
    model = torch.nn.Linear(3, 5)
    model.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))
    assert torch.equal(model.weight, torch.full((5, 3), 200.0))


def test_one_state_can_be_read_alone(store: Store) -> None:
    path = store.save(snapshot(1), IDENTITY)
    (path / "optimizer.safetensors").write_bytes(bytes((path / "optimizer.safetensors").stat().st_size))
    loaded = store.load(None, only=["model"])
    assert loaded is not None
    assert list(loaded.states) == ["model"]
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        store.load(None)


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b"])
def test_a_state_name_that_is_no_file_name_is_refused(store: Store, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot save the state of"):
        store.save(Snapshot(step=1, states={name: {}}, position={}), IDENTITY)


# Damage

EVERY_FILE = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def flip(at: float) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[min(int(at * len(raw)), len(raw) - 1)] ^= 0x10
        path.write_bytes(raw)

    return apply


HARM: dict[str, Callable[[Path], object]] = {
    **{f"flip at {at}": flip(at) for at in (0, 0.01, 0.1, 0.3, 0.5, 0.8, 1)},
    "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "halve": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "append": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "empty": lambda path: path.write_bytes(b""),
    "delete": lambda path: path.unlink(),
    "replace": lambda path: path.rename(path.with_name("away")).parent.joinpath(path.name).mkdir(),
}


@pytest.mark.parametrize("file", EVERY_FILE)
@pytest.mark.parametrize("harm", HARM)
def test_any_damage_is_noticed_and_the_one_before_is_used(store: Store, file: str, harm: str) -> None:
    store.save(snapshot(100), IDENTITY)
    HARM[harm](store.save(snapshot(200), IDENTITY) / file)
    loaded = assert_whole(Store(store.directory).load(IDENTITY), 100)
    (line,) = loaded.passed_over
    assert line.startswith("step-00000200: ")
    assert file in line


def test_every_single_byte_of_a_checkpoint_counts(store: Store) -> None:
    path = store.save(snapshot(1), IDENTITY)
    for file in EVERY_FILE:
        raw = (path / file).read_bytes()
        for at in range(len(raw)):
            changed = bytearray(raw)
            changed[at] ^= 1 << (at % 8)
            (path / file).write_bytes(changed)
            with pytest.raises(CheckpointError, match="none of them whole"):
                store.load(IDENTITY)
        (path / file).write_bytes(raw)
    assert_whole(store.load(IDENTITY), 1)


def test_when_none_is_whole_every_reason_is_told(store: Store) -> None:
    store.save(snapshot(100), IDENTITY)
    store.save(snapshot(200), IDENTITY)
    (store.directory / "step-00000100" / "manifest.json").unlink()
    damage(store, "step-00000200")
    with pytest.raises(CheckpointError) as caught:
        store.load(IDENTITY)
    found = str(caught.value.found)
    assert "step-00000200: state.json has 2 bytes instead of" in found
    assert "step-00000100: manifest.json is missing" in found
    assert caught.value.exit_code == 1


def test_a_copy_under_another_step_is_no_checkpoint(store: Store) -> None:
    path = store.save(snapshot(100), IDENTITY)
    shutil.copytree(path, path.with_name("step-00000900"))
    loaded = assert_whole(store.load(IDENTITY), 100)
    assert loaded.passed_over == ["step-00000900: manifest.json is of step 100"]


def test_a_newer_schema_is_passed_over_by_name() -> None:
    text = Manifest(step=1, identity=IDENTITY, files={}, metrics={}, versions={}).render()
    rest = text[text.index(b"\n") :].replace(b'"schema": 1', b'"schema": 2')
    newer = b'{"hash": "xxh3_128:%s",' % xxhash.xxh3_128_hexdigest(rest).encode() + rest
    with pytest.raises(DamageError, match="has schema 2, this version of paceline reads 1"):
        parse(newer)


def test_what_lies_beside_is_no_damage_but_all_that_is_missing_is_told() -> None:
    entry = FileEntry(3, "xxh3_128:" + "0" * 32)
    manifest = Manifest(step=1, identity=IDENTITY, files={"a": entry, "b": entry}, metrics={}, versions={})
    verify(manifest, 1, {"a": 3, "b": 3, "notes.txt": 9})
    with pytest.raises(DamageError, match=r"a has 2 bytes instead of 3; b is missing"):
        verify(manifest, 1, {"a": 2})


# Names and pruning


def test_a_name_is_never_used_twice(store: Store) -> None:
    first = store.save(snapshot(200), IDENTITY)
    damage(store, "step-00000200")
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    assert store.save(snapshot(200), IDENTITY).name == "step-00000200-2"
    assert store.save(snapshot(200), IDENTITY).name == "step-00000200-3"
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    assert assert_whole(store.load(IDENTITY), 200).path.name == "step-00000200-3"


@given(step=st.integers(0, 10**12), attempt=st.integers(1, 10**6))
def test_names_parse_as_they_print_and_order_by_step_then_attempt(step: int, attempt: int) -> None:
    assert Name.parse(str(Name(step, attempt))) == Name(step, attempt)
    assert Name(step, attempt) < Name(step, attempt + 1) < Name(step + 1, 1)


@pytest.mark.parametrize("text", ["step-1", "step-00000001-1", "step-00000001.tmp-3-ab", "step-00000001-02", "x"])
def test_other_names_are_no_checkpoints(text: str) -> None:
    assert Name.parse(text) is None


def test_the_newest_are_kept_and_the_best(ram: Path) -> None:
    store = Store(ram, keep=2, keep_best="loss")
    losses = [3.0, 1.0, float("nan"), 1.0, 2.0, 5.0]
    for step, loss in enumerate(losses, 1):
        store.save(snapshot(step, loss=loss), IDENTITY)
    assert names(store) == ["step-00000004", "step-00000005", "step-00000006"]
    store.save(snapshot(7), IDENTITY)
    store.save(snapshot(8, other=0.0), IDENTITY)
    assert names(store) == ["step-00000004", "step-00000007", "step-00000008"]


def test_pruning_never_takes_the_last_good_one(ram: Path) -> None:
    """Three damaged checkpoints are newer than the good one that the run goes on from."""
    store = Store(ram, keep=3)
    for step in (100, 200, 300, 400):
        Store(ram, keep=9).save(snapshot(step), IDENTITY)
    for name in ("step-00000200", "step-00000300", "step-00000400"):
        damage(store, name)
    loaded = assert_whole(store.load(IDENTITY), 100)
    assert len(loaded.passed_over) == 3
    store.save(snapshot(150), IDENTITY)
    assert_whole(Store(ram).load(IDENTITY), 150)
    assert {"step-00000100", "step-00000150"} <= set(names(store))
    for step in (250, 350, 450):
        store.save(snapshot(step), IDENTITY)
    assert names(store) == ["step-00000250", "step-00000350", "step-00000450"]


def test_a_store_that_never_loaded_keeps_what_it_just_wrote(ram: Path) -> None:
    for step in (200, 300):
        Store(ram, keep=9).save(snapshot(step), IDENTITY)
        damage(Store(ram), f"step-{step:08d}")
    Store(ram, keep=1).save(snapshot(100), IDENTITY)
    assert_whole(Store(ram).load(IDENTITY), 100)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_damaged_and_saved_the_newest_save_can_be_loaded(ram: Path, data: st.DataObject) -> None:
    directory = Path(tempfile.mkdtemp(dir=ram))
    store = Store(directory, keep=data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(1, 6))):
        step = data.draw(st.integers(1, 4))
        path = store.save(snapshot(step), IDENTITY)
        assert path.is_dir()
        harmed = data.draw(st.sets(st.sampled_from(names(store))))
        for name in harmed - {path.name}:
            damage(store, name)
        found = Store(directory, keep=1).load(IDENTITY)
        assert found is not None
        assert Name.parse(found.path.name) >= Name.parse(path.name)  # type: ignore[operator]
        if data.draw(st.booleans()):
            store.load(IDENTITY)


def test_a_checkpoint_pruned_by_a_running_writer_is_looked_past(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader lists one checkpoint; before it reads it, the run commits the next and prunes the first."""
    store.save(snapshot(1), IDENTITY)
    reader = Store(store.directory)
    listed = reader._names

    def list_then_prune() -> list[Name]:
        names = listed()
        if names == [Name(1, 1)]:
            Store(store.directory, keep=1).save(snapshot(2), IDENTITY)
        return names

    monkeypatch.setattr(reader, "_names", list_then_prune)
    assert_whole(reader.load(IDENTITY), 2)


# Writers that died, writers that live


def test_what_the_dead_left_is_removed_and_what_the_living_write_is_not(store: Store) -> None:
    store.save(snapshot(1), IDENTITY)
    dead, living = (store.directory / f"step-00000002.tmp-{pid}-00" for pid in (1, 2))
    notes = store.directory / "notes.tmp-1"
    for path in (dead, living, notes):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    with locked(living, without_locks=False) as mine:
        assert mine
        store.save(snapshot(2), IDENTITY)
        assert not dead.exists()
        assert living.exists()
        assert_whole(store.load(IDENTITY), 2)
    store.save(snapshot(3), IDENTITY)
    assert not living.exists()
    assert notes.exists()


# Another run


def test_another_identity_is_refused_by_its_fields(store: Store) -> None:
    store.save(snapshot(1), IDENTITY)
    with pytest.raises(CheckpointError) as caught:
        store.load(Identity.of({"recipe": {"seed": 1, "steps": 500, "lanes": 4}}))
    error = caught.value
    assert "recipe.seed: 0 there, 1 here" in str(error.found)
    assert "recipe.lanes: nothing there, 4 here" in str(error.found)
    assert "recipe.steps" not in str(error.found)
    assert error.needed
    assert error.fix
    assert error.exit_code == 2
    assert_whole(store.load(None), 1)


def test_many_differing_fields_are_counted(store: Store) -> None:
    store.save(snapshot(1), Identity.of({str(i): 0 for i in range(30)}))
    with pytest.raises(CheckpointError, match="and 22 more"):
        store.load(Identity.of({str(i): 1 for i in range(30)}))


def test_keys_are_compared_both_ways() -> None:
    compare_keys("model", {"a": 1, "b": 2}, ["b", "a"])
    with pytest.raises(CheckpointError) as caught:
        compare_keys("model", ["block.wight", "x"], ["block.weight", "x", "zzz"])
    error = caught.value
    assert "block.wight only in the checkpoint" in str(error.found)
    assert "block.weight, zzz only in this run" in str(error.found)
    assert "Did you mean 'block.weight'?" in str(error.fix)
    assert error.exit_code == 2
    with pytest.raises(CheckpointError, match=r"0, 1, 2, 3, 4 and 2 more only in this run"):
        compare_keys("model", [], map(str, range(7)))


# In the background


class SlowStore(Store):
    """A real store that begins to write only when told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.go = threading.Event()
        self.busy = 0
        self.most_busy = 0

    def save(self, snapshot: Snapshot, identity: Identity) -> Path:
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        assert self.go.wait(5)
        try:
            return super().save(snapshot, identity)
        finally:
            self.busy -= 1


def test_a_writer_reports_each_save_once_and_never_waits(ram: Path) -> None:
    store = SlowStore(ram)
    with Writer(store) as writer:
        assert writer.outcome() is None
        writer.start(snapshot(1), IDENTITY)
        assert writer.outcome() is None
        store.go.set()
        writer.start(snapshot(2), IDENTITY)
        writer.wait()
        outcomes: list[Any] = [writer.outcome(), writer.outcome()]
        assert [(o.step, o.path.name) for o in outcomes] == [(1, "step-00000001"), (2, "step-00000002")]
        assert all(isinstance(o, Saved) and o.seconds > 0 for o in outcomes)
        assert writer.outcome() is None
    assert store.most_busy == 1


def test_what_is_saved_is_what_was_there_when_it_was_taken(ram: Path) -> None:
    store = SlowStore(ram)
    weight = torch.ones(4)
    groups = [{"lr": 0.1}]
    with Writer(store) as writer:
        writer.start(Snapshot.take(step=1, states={"model": {"w": weight}, "o": {"g": groups}}, position={}), IDENTITY)
        weight.zero_()
        groups[0]["lr"] = 0.2
        store.go.set()
    loaded = store.load(IDENTITY)
    assert loaded is not None
    assert torch.equal(loaded.states["model"]["w"], torch.ones(4))
    assert loaded.states["o"] == {"g": [{"lr": 0.1}]}


def test_a_writer_keeps_a_failure_as_its_outcome_and_the_store_clean(store: Store) -> None:
    store.save(snapshot(1), IDENTITY)
    bad = Snapshot(step=2, states={"model": {"ok": torch.ones(2), "bad": object()}}, position={})
    with Writer(store) as writer:
        writer.start(bad, IDENTITY)
        writer.wait()
        outcome = writer.outcome()
        assert isinstance(outcome, CheckpointError)
        assert "model/bad" in str(outcome)
        writer.start(Snapshot(step=2, states={"model": None}, position=None), IDENTITY)  # type: ignore[arg-type]
        writer.wait()
        outcome = writer.outcome()
        assert isinstance(outcome, CheckpointError)
        assert isinstance(outcome.__cause__, TypeError)
    assert names(store) == ["step-00000001"]


def test_a_writer_waits_no_longer_than_its_deadline(ram: Path) -> None:
    store = SlowStore(ram)
    writer = Writer(store, timeout_s=0.05)
    writer.start(snapshot(1), IDENTITY)
    with pytest.raises(CheckpointError, match="cannot finish the checkpoint of step 1"):
        writer.wait()
    store.go.set()
    writer.timeout_s = 5
    writer.close()
    assert isinstance(writer.outcome(), Saved)


def test_a_directory_that_cannot_be_written_is_an_error_in_four_beats(ram: Path) -> None:
    (ram / "file").write_text("")
    store = Store(ram / "file" / "checkpoints")
    with pytest.raises(CheckpointError) as caught:
        store.save(snapshot(7), IDENTITY)
    error = caught.value
    assert error.problem == "cannot save the checkpoint of step 7"
    assert "Not a directory" in str(error.found)
    assert error.needed
    assert error.fix
    assert error.exit_code == 1
    with pytest.raises(CheckpointError, match="cannot look for checkpoints"):
        Store(ram / "file").load(IDENTITY)
