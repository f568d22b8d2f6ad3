"""``proof.json``: the record that several runs gave the same bits, or where they did not.

schema      1
created     UTC, ISO 8601
equal       whether every variation gave the same bits after every step
steps       how many each of them ran
identity    {"digest", "fields"}: recipe, task, data, tracked names and shapes, as a resume would have to match them
machine     {"cpu", "device", "paceline", "torch", "python"}
variations  the first is the reference; of each:
    workers     worker counts in turn: [2], or [2, 3, 1] when it was stopped and resumed on others
    faults      null, or the sentence of the faults that it met, all of them: "kill worker=1 step=3"
    recompute   null, or the way to recompute that it had in place of the settings' own: "every:2", ["blocks.0"]
                or {"blocks.*": "selective"}
    cost        null, or what those have cost: {"lost": workers, "seconds": for which the others stood still,
                "restarts": of all workers, when none was left or a fault asked the run to stop}
    digest      of everything tracked after the last step, 32 hexadecimal digits
    seconds     of wall time, start-up included
    digests     one per step
    difference  null, or the first one from the reference:
        step        finished steps, from 1
        kind        "lane loss" or "tensor"
        name        "lane 3" or "model.head.weight"
        reference, found    the loss as a hexadecimal float, or the tensor's digest, of each
        count, of   how many of that kind differ at that step, of how many
    weights     null, or how far the final weights are from the reference's: {"max_abs", "at", "relative"}

"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import MANIFEST, Manifest
from paceline.checkpoint.manifest import parse as parse_manifest
from paceline.errors import PacelineError
from paceline.run_dir import replace_text
from paceline.verify.runs import Variation

__all__ = ["write"]

SCHEMA = 1


def write(path: Path, variations: Sequence[Variation]) -> None:
    """Writes the proof, whole or not at all.

    Raises:
        PacelineError: the runs were not of one identity (data that changed meanwhile, for one).
    """
    manifests = [parse_manifest((variation.checkpoint().path / MANIFEST).read_bytes()) for variation in variations]
    first = manifests[0]
    for variation, manifest in zip(variations, manifests, strict=True):
        if unlike := first.identity.differences(manifest.identity):
            raise PacelineError(
                "cannot compare the runs",
                found=f"in the one with workers {variation.name}, {'; '.join(unlike[:4])}",
                needed="one recipe, task and data for all",
                fix="Leave the data alone while they run, and start again",
            )
    record = {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "equal": len(variations) > 1 and all(variation.difference is None for variation in variations),
        "steps": len(variations[0].trace),
        "identity": {"digest": first.identity.digest, "fields": dict(first.identity.fields)},
        "machine": _machine(first),
        "variations": [
            {
                "workers": list(variation.workers),
                "faults": str(variation.faults) or None,
                "recompute": variation.recompute,
                "cost": variation.cost and dataclasses.asdict(variation.cost),
                "digest": variation.trace[-1].digest,
                "seconds": round(variation.seconds, 3),
                "digests": [bits.digest for bits in variation.trace],
                "difference": variation.difference and dataclasses.asdict(variation.difference),
                "weights": variation.weights and dataclasses.asdict(variation.weights),
            }
            for variation in variations
        ],
    }
    replace_text(path, json.dumps(record, indent=2) + "\n")


def _machine(manifest: Manifest) -> dict[str, Any]:
    device = manifest.identity.fields["recipe.device"]
    return {
        "cpu": _cpu(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        **manifest.versions,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
