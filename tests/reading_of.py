"""For tests of the doctor's static pass: a script is read, and what the reader knows by then is looked at."""

from __future__ import annotations

from pathlib import Path

from paceline.doctor.reading import read
from paceline.doctor.reading.program import Program
from paceline.doctor.reading.statements import Reader
from paceline.doctor.reading.values import Value

START = """
import argparse, math, operator, os, random
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--deep", action="store_true")
args = parser.parse_args()
args.rank = rank
"""
LOSS = "model = nn.Linear(2, 1)\nloss = F.mse_loss(model(torch.zeros(4, 2)), torch.zeros(4, 1))\n"


def walked(folder: Path, text: str) -> Reader:
    script = folder / "train.py"
    script.write_text(START + text)
    reader = Reader(Program(script))
    reader.walk()
    return reader


def value_of(folder: Path, expression: str, before: str = "") -> Value:
    return walked(folder, f"{before}\nx = {expression}\n").program.main.names["x"]


def found_in(folder: Path, text: str) -> set[str]:
    script = folder / "train.py"
    script.write_text(text)
    seen = read(script)
    assert seen.notes == ()
    return {finding.id for finding in seen.findings if finding.level != "advice"}
