"""States as tensors and JSON: everything comes back to the bit, or is refused by its path."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import Snapshot
from paceline.checkpoint.disk import write_file
from paceline.checkpoint.pack import pack, pack_json, unpack
from paceline.checkpoint.tensors import DTYPES, read_tensors, tensor_chunks
from paceline.errors import CheckpointError


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if len(flat) else b""


def assert_same(a: Any, b: Any) -> None:
    """Equal in type, order and every bit: NaN equals the same NaN, 0.0 is not -0.0, 1 is not True."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert raw(a) == raw(b)
    elif isinstance(a, dict):
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for item, other in zip(a, b, strict=True):
            assert_same(item, other)
    elif isinstance(a, np.generic):
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, float):
        assert struct.pack(">d", a) == struct.pack(">d", b)
    else:
        assert a == b


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, any bits (NaN payloads, -0.0), up to three dimensions, some of them empty or transposed."""
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    bits = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        bits = bytes(byte & 1 for byte in bits)
    tensor = torch.empty(shape, dtype=dtype)
    if size:
        tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(bits), dtype=torch.uint8))
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


keys = st.text(max_size=4) | st.integers() | st.sampled_from(["0", "a/b", "a.b", "a", "b", "__metadata__", "\ud800"])
numpy_kinds = [np.bool_, np.int8, np.uint16, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64]
numpy_scalars = st.builds(lambda kind, value: kind(value), st.sampled_from(numpy_kinds), st.integers(0, 100))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | numpy_scalars
states = st.recursive(
    scalars | tensors(),
    lambda below: (
        st.lists(below, max_size=3) | st.lists(below, max_size=3).map(tuple) | st.dictionaries(keys, below, max_size=3)
    ),
    max_leaves=8,
)


def through_files(state: Any, directory: Path) -> Any:
    packed = pack("state", state)
    path = directory / "state.safetensors"
    path.unlink(missing_ok=True)
    entry = write_file(path, tensor_chunks(packed.tensors))
    return unpack(packed.skeleton, read_tensors(path, entry))


@given(state=states)
def test_any_state_comes_back_to_the_bit(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.getbasetemp()
    back = through_files(state, directory)
    assert_same(back, state)
    packed = pack("state", back)
    for tensor in packed.tensors.values():
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
    theirs = safetensors.torch.load_file(directory / "state.safetensors")
    assert sorted(theirs) == sorted(packed.tensors)
    for key, tensor in packed.tensors.items():
        assert_same(theirs[key], tensor)


@given(state=states)
def test_a_snapshot_shares_nothing(state: Any) -> None:
    snapshot = Snapshot.take(step=1, states={"a": state}, position={"list": [1]})
    assert_same(snapshot.states["a"], state)
    theirs = {t.data_ptr() for t in pack("a", state).tensors.values() if t.numel()}
    ours = {t.data_ptr() for t in pack("a", snapshot.states["a"]).tensors.values() if t.numel()}
    assert not theirs & ours


def test_an_optimizer_goes_on_after_a_round_trip_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 3), 0.1 * (step + 1))).square().sum().backward()
            optimizer.step()

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    train(model, optimizer, 3)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = {name: through_files(state, tmp_path) for name, state in saved.items()}
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    other_optimizer = torch.optim.AdamW(other.parameters())
    other.load_state_dict(back["model"])
    other_optimizer.load_state_dict(back["optimizer"])
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_a_module_is_written_under_its_bare_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    write_file(tmp_path / "model.safetensors", tensor_chunks(pack("model", model.state_dict()).tensors))
    other = torch.nn.Linear(2, 2)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_tied_weights_are_one_copy_in_memory_and_one_entry_per_name(tmp_path: Path) -> None:
    weight = torch.arange(9.0).reshape(3, 3)
    taken = Snapshot.take(step=1, states={"model": {"in": weight, "out": weight, "T": weight.T}}, position={})
    state = taken.states["model"]
    assert state["in"].data_ptr() == state["out"].data_ptr() != weight.data_ptr()
    back = through_files(state, tmp_path)
    assert_same(back, {"in": weight, "out": weight, "T": weight.T})
    assert back["in"].data_ptr() != back["out"].data_ptr()


def test_every_tensor_in_a_file_is_aligned_to_its_own_element(tmp_path: Path) -> None:
    state = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(1), "c": torch.ones(1).double(), "d": torch.ones(0)}
    write_file(tmp_path / "file", tensor_chunks(state))
    content = (tmp_path / "file").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert begin % 64 == 0
    header = json.loads(content[8:begin])
    for key, tensor in state.items():
        assert (begin + header[key]["data_offsets"][0]) % tensor.element_size() == 0


def test_what_schedulers_hold_comes_back_usable() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([parameter]), [2, 3])
    packed = pack("scheduler", scheduler.state_dict())
    back = unpack(packed.skeleton, packed.tensors)
    assert type(back["milestones"]) is Counter
    assert back["milestones"] == Counter([2, 3])
    assert unpack(pack("a", OrderedDict(b=1)).skeleton, {}) == {"b": 1}


def test_views_with_lazy_bits_are_written_resolved(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": numbers.conj(), "imag": numbers.conj().imag}
    back = through_files(state, tmp_path)
    assert torch.equal(back["conj"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(back["imag"], torch.tensor([-2.0, 4.0]))


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        ({"a": [0, {1}]}, "opt/a/1", "builtins.set"),
        ({"a": (np.zeros(1),)}, "opt/a/0", "numpy.ndarray"),
        ({"b": {(1, 2): 3}}, "opt/b/(1, 2)", "a key of type tuple"),
        ({True: 1}, "opt/True", "a key of type bool"),
        ({"f": print}, "opt/f", "builtin_function_or_method"),
        ({"s": torch.eye(2).to_sparse()}, "opt/s", "torch.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, "opt/m", "meta"),
        ({"c": torch.zeros(2, dtype=torch.complex128)}, "opt/c", "complex128"),
    ],
)
def test_what_no_file_can_hold_is_refused_by_its_path(value: Any, path: str, what: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        pack("opt", value)
    error = caught.value
    assert path in str(error.found)
    assert what in str(error.found)
    assert error.problem
    assert error.needed
    assert error.fix
    assert error.exit_code == 2


def test_a_list_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="levels"):
        pack("loop", loop)


def test_the_position_holds_no_tensors() -> None:
    with pytest.raises(CheckpointError, match="a tensor at position/rate"):
        pack_json("position", {"rate": torch.ones(())})


def test_a_snapshot_of_a_gpu_waits_for_every_stream(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs --device cuda")
    stream: Any = torch.cuda.Stream  # its constructor has no types
    side = stream()
    weight = torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(200):
            weight += 1
    taken = Snapshot.take(step=1, states={"model": {"w": weight}}, position={})
    weight.zero_()
    assert taken.states["model"]["w"].device.type == "cpu"
    assert torch.equal(taken.states["model"]["w"], torch.full((1 << 24,), 200.0))
