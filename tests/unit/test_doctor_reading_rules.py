"""Each rule of the static pass: wrong scripts in many styles, and right ones that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.doctor.reading import read
from paceline.doctor.rules import RULES

HEAD = """
import os, random, time, argparse, contextlib
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
import torch.utils.data as tud
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, images):
        return self.head(self.body(images))

class Pictures(tud.Dataset):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return torch.zeros(4), 0

def start():
    dist.init_process_group(backend="nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return dist.get_rank(), local, dist.get_world_size()

def stop():
    dist.destroy_process_group()
"""

TRAINER = """
class Trainer:
    def __init__(self, accumulate=1):
        self.rank, self.local, self.world = start()
        self.net = Net().to(self.local)
        self.model = DistributedDataParallel(self.net, device_ids=[self.local])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3 * self.world)
        self.criterion = nn.CrossEntropyLoss()
        self.data = Pictures(sorted(os.listdir("train")))
        self.sampler = DistributedSampler(self.data)
        self.loader = tud.DataLoader(self.data, batch_size=32 // self.world, sampler=self.sampler)
        self.accumulate = accumulate

    def is_main(self):
        return self.rank == 0

    def batches(self, epoch):
        self.sampler.set_epoch(epoch)
        for images, labels in self.loader:
            yield images.to(self.local), labels.to(self.local)

    def run(self, epochs):
        for epoch in range(epochs):
            for step, (images, labels) in enumerate(self.batches(epoch)):
                self.step(step, images, labels)
            self.done(epoch)
        stop()

    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def done(self, epoch):
        pass
"""

MAIN = """
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    Job().run(parser.parse_args().epochs)
"""


def job(methods: str) -> str:
    """A trainer of which some methods are other ones."""
    return HEAD + TRAINER + "\nclass Job(Trainer):\n" + methods + MAIN


def script(body: str) -> str:
    return HEAD + body


LOOP = """
def train(model, loader, optimizer, sampler, epochs, device):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
"""

WRONG: dict[str, dict[str, str]] = {
    "missing-set-epoch": {
        "loader from a function": script("""
def data(files):
    dataset = Pictures(files)
    order = DistributedSampler(dataset, shuffle=True)
    return tud.DataLoader(dataset, batch_size=4, sampler=order), order

def main(epochs=3):
    rank, local, world = start()
    loader, _ = data(sorted(os.listdir("a")))
    model = DistributedDataParallel(Net().cuda(local), device_ids=[local])
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        for x, y in loader:
            sgd.zero_grad(); F.cross_entropy(model(x), y).backward(); sgd.step()
    stop()
main()
"""),
        "trainer": job("""
    def batches(self, epoch):
        for images, labels in self.loader:
            yield images, labels
"""),
        "endless iterator": script("""
rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, 4, sampler=sampler)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
it = iter(loader)
for step in range(10_000):
    try:
        x, y = next(it)
    except StopIteration:
        it = iter(loader)
        x, y = next(it)
    opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
stop()
"""),
        "always the same epoch": job("""
    def batches(self, epoch):
        self.sampler.set_epoch(0)
        yield from self.loader
"""),
    },
    "shuffle-with-sampler": {
        "options in a dict": script("""
rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
options = dict(batch_size=4, shuffle=True, num_workers=2)
loader = tud.DataLoader(data, sampler=DistributedSampler(data), **options)
stop()
"""),
    },
    "no-distributed-sampler": {
        "trainer": job("""
    def batches(self, epoch):
        for images, labels in tud.DataLoader(self.data, batch_size=8, shuffle=True):
            yield images, labels

    def run(self, epochs):
        loader = tud.DataLoader(self.data, batch_size=8, shuffle=True)
        for epoch in range(epochs):
            for images, labels in loader:
                self.step(0, images, labels)
        stop()
"""),
        "function": script(
            LOOP
            + """
def main():
    rank, local, world = start()
    model = DistributedDataParallel(Net().to(local))
    data = Pictures(sorted(os.listdir("a")))
    loader = tud.DataLoader(data, batch_size=8, drop_last=True)
    train(model, loader, torch.optim.SGD(model.parameters(), 0.1), DistributedSampler(data), 3, local)
    stop()
main()
"""
        ),
    },
    "sampler-seed-differs": {
        "seed by environment": script("""
rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data, world, rank, seed=7 * int(os.environ["RANK"]))
stop()
"""),
        "seed by time": script("""
rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data, seed=int(time.time()))
stop()
"""),
    },
    "dataset-order-differs": {
        "shuffled without a seed": script("""
rank, local, world = start()
files = sorted(os.listdir("a"))
random.shuffle(files)
sampler = DistributedSampler(Pictures(files))
stop()
"""),
        "shuffled by rank": script("""
rank, local, world = start()
np.random.seed(100 + dist.get_rank())
files = sorted(os.listdir("a"))
np.random.shuffle(files)
data = Pictures(files[:100])
sampler = DistributedSampler(data)
stop()
"""),
        "a set": script("""
rank, local, world = start()
names = list({name.lower() for name in ["a", "b"]})
sampler = DistributedSampler(Pictures(names))
stop()
"""),
        "as listed": script("""
import glob
rank, local, world = start()
sampler = DistributedSampler(Pictures(glob.glob("data/*.jpg")))
stop()
"""),
    },
    "random-split-differs": {
        "generator by rank": script("""
rank, local, world = start()
parts = tud.random_split(Pictures([]), [0.9, 0.1], generator=torch.Generator().manual_seed(rank))
stop()
"""),
        "seeded in a helper": script("""
def seed_everything(seed):
    random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)
rank, local, world = start()
seed_everything(1 + rank)
train, held = tud.random_split(Pictures([]), [90, 10])
stop()
"""),
    },
    "iterable-not-sharded": {
        "workers only": script("""
class Lines(tud.IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        info = tud.get_worker_info()
        with open(self.path) as lines:
            for number, line in enumerate(lines):
                if info is None or number % info.num_workers == info.id:
                    yield torch.zeros(4), 0

rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for x, y in tud.DataLoader(Lines("a.txt"), batch_size=4, num_workers=2):
    opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
stop()
"""),
    },
    "stale-epoch-in-workers": {
        "attribute": script("""
rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, 4, sampler=sampler, num_workers=4, persistent_workers=True)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    loader.dataset.epoch = epoch
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
stop()
"""),
        "method": script("""
class Augmented(Pictures):
    def set_epoch(self, epoch):
        self.epoch = epoch

rank, local, world = start()
data = Augmented(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, 4, sampler=sampler, num_workers=4, persistent_workers=True)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    data.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
stop()
"""),
    },
    "worker-seed-identical": {
        "worker number only": script("""
def init(worker):
    random.seed(1234 + worker)
rank, local, world = start()
loader = tud.DataLoader(Pictures([]), 4, num_workers=2, worker_init_fn=init)
stop()
"""),
        "lambda": script("""
rank, local, world = start()
loader = tud.DataLoader(Pictures([]), 4, num_workers=2, worker_init_fn=lambda w: np.random.seed(0))
stop()
"""),
    },
    "rng-identical-across-ranks": {
        "dropout in a block": script(
            LOOP
            + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.proj(x))

rank, local, world = start()
torch.manual_seed(42)
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
model = DistributedDataParallel(Block().to(local))
train(model, tud.DataLoader(data, 4, sampler=sampler), torch.optim.SGD(model.parameters(), 0.1), sampler, 2, local)
stop()
"""
        ),
    },
    "uneven-inputs": {
        "steps by rank": job("""
    def run(self, epochs):
        steps = 100 if self.rank == 0 else 90
        for step in range(steps):
            self.step(step, torch.zeros(4), torch.zeros(4))
        stop()
"""),
        "a share of ten thousand and one": script("""
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for index in range(rank, 10_001, world):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    },
    "rank-local-skip": {
        "bad loss": job("""
    def step(self, step, images, labels):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(images), labels)
        if torch.isnan(loss).any():
            return
        loss.backward()
        self.optimizer.step()
"""),
        "only good ones": job("""
    def step(self, step, images, labels):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(images), labels)
        if loss.item() < 100.0:
            loss.backward()
            self.optimizer.step()
"""),
        "out of memory": job("""
    def run(self, epochs):
        for epoch in range(epochs):
            for images, labels in self.batches(epoch):
                try:
                    self.step(0, images, labels)
                except RuntimeError:
                    continue
        stop()
"""),
    },
    "eval-padded-duplicates": {
        "accuracy": script("""
@torch.no_grad()
def accuracy(model, loader):
    right = torch.zeros(1)
    for x, y in loader:
        right += (model(x).argmax(-1) == y).sum()
    dist.all_reduce(right)
    return right.item() / 1001

rank, local, world = start()
held = tud.TensorDataset(torch.zeros(1001, 4), torch.zeros(1001))
loader = tud.DataLoader(held, 8, sampler=DistributedSampler(held, shuffle=False))
print(rank, accuracy(Net(), loader))
stop()
"""),
    },
    "schedule-length-mismatch": {
        "whole dataset": job("""
    def run(self, epochs):
        self.loader = tud.DataLoader(self.data, batch_size=32, sampler=self.sampler)
        steps = epochs * (len(self.data) // 32)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for images, labels in self.loader:
                self.step(0, images, labels)
                self.schedule.step()
        stop()
"""),
    },
    "loader-workers-oversubscribed": {
        "name": script("""
import multiprocessing
rank, local, world = start()
workers = max(1, multiprocessing.cpu_count() - 1)
loader = tud.DataLoader(Pictures([]), 4, num_workers=workers)
stop()
"""),
    },
    "threads-oversubscribed": {
        "environment": script("""
os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
rank, local, world = start()
stop()
"""),
    },
    "ddp-forward-bypassed": {
        "the module kept": job("""
    def step(self, step, images, labels):
        loss = self.criterion(self.net(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
        "a method of it": job("""
    def step(self, step, images, labels):
        features = self.model.module.body(images)
        loss = self.criterion(self.model.module.head(features), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
        "unwrapped": script("""
def unwrap(model):
    return model.module if hasattr(model, "module") else model

rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); unwrap(model)(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    },
    "replicas-start-different": {
        "averaged by hand": script("""
def average(model, world):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
            p.grad.data /= world

rank, local, world = start()
torch.manual_seed(int(os.environ["RANK"]) + 5)
net = Net().to(local)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); F.cross_entropy(net(torch.zeros(4)), torch.zeros(1)).backward()
    average(net, world)
    opt.step()
stop()
"""),
    },
    "params-changed-after-wrap": {
        "new head": script("""
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
model.module.head = nn.Linear(8, 10).to(local)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
        "frozen too late": job("""
    def run(self, epochs):
        for p in self.model.module.body.parameters():
            p.requires_grad = False
        super().run(epochs)
"""),
        "frozen by requires_grad_": job("""
    def run(self, epochs):
        self.net.body.requires_grad_(False)
        super().run(epochs)
"""),
    },
    "redundant-grad-allreduce": {
        "helper": job("""
    def sync(self):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world

    def step(self, step, images, labels):
        self.optimizer.zero_grad()
        self.criterion(self.model(images), labels).backward()
        self.sync()
        self.optimizer.step()
"""),
    },
    "loss-scaled-by-world-size": {
        "times": job("""
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels) * self.world
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
        "divided": job("""
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels)
        loss /= dist.get_world_size()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
    },
    "no-sync-forward-outside": {
        "trainer": job("""
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels) / self.accumulate
        if (step + 1) % 4:
            with self.model.no_sync():
                loss.backward()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
"""),
    },
    "unsynced-optimizer-step": {
        "always held back": job("""
    def step(self, step, images, labels):
        with self.model.no_sync():
            loss = self.criterion(self.model(images), labels) / 4
            loss.backward()
        if (step + 1) % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
"""),
        "the first instead of the last": script("""
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
accumulate = 8
for batch in range(100):
    opt.zero_grad()
    for micro in range(accumulate):
        context = contextlib.nullcontext() if micro == 0 else model.no_sync()
        with context:
            loss = F.cross_entropy(model(torch.zeros(4)), torch.zeros(1)) / accumulate
            loss.backward()
    opt.step()
stop()
"""),
        "off by one with an option": script("""
parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=4)
args = parser.parse_args()
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for i in range(1000):
    last = i % args.accumulate == 0
    with contextlib.nullcontext() if last else model.no_sync():
        (F.cross_entropy(model(torch.zeros(4)), torch.zeros(1)) / args.accumulate).backward()
    if (i + 1) % args.accumulate == 0:
        opt.step(); opt.zero_grad()
stop()
"""),
    },
    "accumulation-not-normalised": {
        "every fourth": job("""
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels)
        loss.backward()
        if (step + 1) % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
"""),
        "option": script("""
parser = argparse.ArgumentParser()
parser.add_argument("--accum", type=int, required=True)
args = parser.parse_args()
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.cuda.amp.GradScaler()
for i, x in enumerate(torch.zeros(100, 4)):
    with torch.autocast("cuda"):
        loss = F.mse_loss(model(x), x)
    scaler.scale(loss).backward()
    if (i + 1) % args.accum == 0 or i == 99:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
stop()
"""),
    },
    "unequal-weight-average": {
        "tokens": job("""
    def step(self, step, images, labels):
        losses = F.cross_entropy(self.model(images), labels, reduction="none")
        mask = labels != -100
        loss = (losses * mask).sum() / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
    },
    "clip-before-sync": {
        "trainer": job("""
    def step(self, step, images, labels):
        last = (step + 1) % 4 == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            (self.criterion(self.model(images), labels) / 4).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad()
"""),
        "by hand": script("""
rank, local, world = start()
net = Net().to(local)
for p in net.parameters():
    dist.broadcast(p.data, 0)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(10):
    opt.zero_grad()
    F.cross_entropy(net(torch.zeros(4)), torch.zeros(1)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for p in net.parameters():
        dist.all_reduce(p.grad); p.grad /= world
    opt.step()
stop()
"""),
    },
    "gradscaler-diverges": {
        "on good losses": job("""
    def step(self, step, images, labels):
        scaler = torch.amp.GradScaler("cuda")
        loss = self.criterion(self.model(images), labels)
        scaler.scale(loss).backward()
        if torch.isfinite(loss):
            scaler.step(self.optimizer)
            scaler.update()
"""),
        "unscaled before it is reduced": script("""
rank, local, world = start()
net = Net().to(local)
for p in net.parameters():
    dist.broadcast(p.data, 0)
opt = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler()
for _ in range(10):
    opt.zero_grad()
    scaler.scale(F.cross_entropy(net(torch.zeros(4)), torch.zeros(1))).backward()
    scaler.unscale_(opt)
    for p in net.parameters():
        dist.all_reduce(p.grad); p.grad /= world
    scaler.step(opt); scaler.update()
stop()
"""),
    },
    "gather-without-grad": {
        "helper": job("""
    def everyone(self, z):
        pool = [torch.zeros_like(z) for _ in range(self.world)]
        dist.all_gather(pool, z.contiguous())
        return torch.cat(pool, dim=0)

    def step(self, step, images, labels):
        z = F.normalize(self.model(images), dim=-1)
        logits = z @ self.everyone(z).t()
        loss = F.cross_entropy(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
        "into tensor": job("""
    def step(self, step, images, labels):
        z = self.model(images)
        out = torch.empty(z.size(0) * self.world, 2, device=z.device)
        dist.all_gather_into_tensor(out, z)
        loss = F.cross_entropy(z @ out.T, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
    },
    "optimizer-stale-params": {
        "head replaced": script("""
rank, local, world = start()
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.1)
net.head = nn.Linear(8, 100)
model = DistributedDataParallel(net.to(local))
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
        "another model": script("""
rank, local, world = start()
net = Net()
opt = torch.optim.SGD(net.parameters(), 0.1)
model = DistributedDataParallel(Net().to(local))
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    },
    "unused-parameters": {
        "a head for later": script("""
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Net()
        self.aux_head = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x):
        return self.trunk(x)

rank, local, world = start()
model = DistributedDataParallel(Two().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
        "in a part": script("""
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.norm(x))

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(3)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x

rank, local, world = start()
model = DistributedDataParallel(Whole().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    },
    "find-unused-unneeded": {
        "trainer": job("""
    def run(self, epochs):
        self.model = DistributedDataParallel(self.net, device_ids=[self.local], find_unused_parameters=True)
        super().run(epochs)
"""),
    },
    "reentrant-checkpoint": {
        "module alias": script("""
from torch.utils import checkpoint as cp
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = cp.checkpoint(block, x, use_reentrant=True)
        return x

rank, local, world = start()
model = DistributedDataParallel(Deep().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    },
    "static-graph-changes": {
        "warm up": script("""
class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        x = self.one(x)
        if self.seen > 100:
            x = self.two(x)
        return x

rank, local, world = start()
model = DistributedDataParallel(Warm().to(local), static_graph=True)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
        "layer drop": script("""
class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if random.random() > 0.1:
                x = layer(x)
        return x

rank, local, world = start()
model = DistributedDataParallel(Drop().to(local), static_graph=True)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    },
    "model-differs-across-ranks": {
        "by rank": script("""
rank, local, world = start()
net = Net(width=16 if rank == 0 else 8)
model = DistributedDataParallel(net.to(local))
stop()
"""),
        "classes of a shard": script("""
rank, local, world = start()
labels = torch.load(f"labels_{rank}.pt", map_location="cpu")
model = DistributedDataParallel(nn.Linear(4, len(set(labels.tolist()))).to(local))
stop()
"""),
    },
    "rank-dependent-graph": {
        "by rank": script("""
class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        if dist.get_rank() == 0:
            return self.left(x)
        return self.right(x)

rank, local, world = start()
model = DistributedDataParallel(Split().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
        "by chance": script("""
class Chance(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        x = self.left(x)
        return self.right(x) if random.random() < 0.5 else x

rank, local, world = start()
model = DistributedDataParallel(Chance().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    },
    "not-distributed": {
        "never wrapped": script("""
rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
net = Net().to(local)
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in tud.DataLoader(data, 4, sampler=sampler):
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
stop()
"""),
    },
    "batchnorm-unsynced": {
        "convolutions": script("""
class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        return self.net(x)

rank, local, world = start()
model = DistributedDataParallel(Conv().to(local))
stop()
"""),
    },
    "syncbn-on-cpu": {
        "always converted": script("""
dist.init_process_group("gloo")
net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
model = DistributedDataParallel(net)
stop()
"""),
    },
    "buffers-not-synced": {
        "saved": script("""
rank, local, world = start()
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(local)
model = DistributedDataParallel(net, broadcast_buffers=False)
if rank == 0:
    torch.save(model.module.state_dict(), "last.pt")
stop()
"""),
    },
    "rank-local-buffer-overwritten": {
        "in place": script("""
class Tally(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.fc(x - self.mean)

rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
model = DistributedDataParallel(Tally().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in tud.DataLoader(data, 4, sampler=sampler):
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
stop()
"""),
    },
    "rank-conditional-collective": {
        "behind an early return": job("""
    def done(self, epoch):
        if not self.is_main():
            return
        torch.save(self.net.state_dict(), "last.pt")
        dist.barrier()
"""),
        "short circuit": job("""
    def done(self, epoch):
        loss = torch.zeros(1)
        self.is_main() and dist.all_reduce(loss)
"""),
        "continue": script("""
rank, local, world = start()
for epoch in range(4):
    if rank != 0:
        continue
    dist.broadcast(torch.zeros(1), src=0)
stop()
"""),
        "every so often, two calls deep": script("""
class Board:
    def __init__(self, *names):
        self.totals = {name: torch.zeros(1) for name in names}

    def mean(self, name):
        dist.all_reduce(self.totals[name])
        return self.totals[name].item()

    def report(self):
        return ", ".join(f"{name} {self.mean(name)}" for name in self.totals)

def chief():
    return not dist.is_initialized() or dist.get_rank() == 0

rank, local, world = start()
board = Board("loss", "accuracy")
for step in range(400):
    if step % 50 == 0 and chief():
        print(f"{step}: {board.report()}")
stop()
"""),
        "every so often, the others skip": script("""
rank, local, world = start()
for step in range(400):
    if not (step % 50 == 0 and rank == 0) or step < 10:
        continue
    dist.broadcast(torch.zeros(1), src=0)
stop()
"""),
        "gathered on rank 0": job("""
    def metrics(self, value):
        parts = [None] * self.world
        dist.all_gather_object(parts, value)
        return parts

    def done(self, epoch):
        if self.rank == 0:
            print(self.metrics(1.0))
"""),
    },
    "rank-conditional-ddp-forward": {
        "evaluation": script("""
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.fc(x))

@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    return sum(model(x).sum().item() for x, _ in loader)

def main():
    rank, local, world = start()
    model = DistributedDataParallel(Normed().to(local))
    loader = tud.DataLoader(Pictures([]), 4)
    if rank == 0:
        print(evaluate(model, loader))
    stop()
main()
"""),
    },
    "rank-local-early-stop": {
        "patience": job("""
    def run(self, epochs):
        best, patience = None, 0
        for epoch in range(epochs):
            total = 0.0
            for images, labels in self.batches(epoch):
                self.step(0, images, labels)
                with torch.no_grad():
                    total += self.criterion(self.net(images), labels).item()
            if best is None or total < best:
                best, patience = total, 0
            else:
                patience += 1
                if patience > 3:
                    print("rank", self.rank, "stops")
                    break
        stop()
"""),
        "out of time": job("""
    def run(self, epochs):
        began = time.monotonic()
        for epoch in range(epochs):
            for images, labels in self.batches(epoch):
                self.step(0, images, labels)
            if time.monotonic() - began > 3600:
                break
        stop()
"""),
        "a class that decides": script("""
class Stopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.stop = patience, None, 0, False

    def __call__(self, loss):
        if self.best is None or loss < self.best:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
            if self.bad >= self.patience:
                self.stop = True

rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, 4, sampler=sampler)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
stopper = Stopper(3)
for epoch in range(100):
    sampler.set_epoch(epoch)
    running = 0.0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        running += loss.item()
    stopper(running)
    if stopper.stop:
        break
stop()
"""),
    },
    "collective-order-differs": {
        "swapped": script("""
rank, local, world = start()
a, b = torch.zeros(1), torch.zeros(1)
if rank == 0:
    dist.all_reduce(a)
    dist.broadcast(b, 0)
else:
    dist.broadcast(b, 0)
    dist.all_reduce(a)
stop()
"""),
    },
    "data-dependent-collective": {
        "some label": job("""
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if (labels == 3).any():
            count = (labels == 3).sum()
            dist.all_reduce(count)
"""),
    },
    "save-on-all-ranks": {
        "method": job("""
    def save(self, name, **more):
        torch.save({"model": self.net.state_dict(), **more}, os.path.join("runs", name))

    def done(self, epoch):
        self.save(f"epoch_{epoch}.pt", epoch=epoch)
"""),
        "the best": job("""
    best = 0.0
    def done(self, epoch):
        accuracy = torch.rand(1).item()
        if accuracy > self.best:
            self.best = accuracy
            torch.save(self.model.module.state_dict(), "best.pt")
"""),
    },
    "save-on-local-rank0": {
        "method": job("""
    def done(self, epoch):
        if self.local == 0:
            torch.save(self.net.state_dict(), "last.pt")
"""),
    },
    "load-without-map-location": {
        "resume": job("""
    def run(self, epochs):
        if os.path.exists("last.pt"):
            self.net.load_state_dict(torch.load("last.pt"))
        super().run(epochs)
"""),
    },
    "module-prefix-checkpoint": {
        "in a dict": script("""
def save(model, path):
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict()}, path)

rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
save(model, "last.pt")
dist.barrier()
plain = Net()
plain.load_state_dict(torch.load("last.pt", map_location="cpu")["model"])
stop()
"""),
    },
    "load-without-barrier": {
        "weights of rank 0": script("""
rank, local, world = start()
net = Net()
path = "/tmp/start.pt"
if rank == 0:
    torch.save(net.state_dict(), path)
net.load_state_dict(torch.load(path, map_location="cpu"))
model = DistributedDataParallel(net.to(local))
stop()
"""),
    },
    "resume-on-one-rank": {
        "trainer": job("""
    def run(self, epochs):
        if self.is_main() and os.path.exists("last.pt"):
            state = torch.load("last.pt", map_location="cpu")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        super().run(epochs)
"""),
    },
    "metric-not-reduced": {
        "accuracy": job("""
    def done(self, epoch):
        data = Pictures(sorted(os.listdir("val")))
        loader = tud.DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))
        right = total = 0
        self.model.eval()
        with torch.no_grad():
            for images, labels in loader:
                right += (self.model(images).argmax(1) == labels).sum().item()
                total += labels.size(0)
        if self.is_main():
            print(f"epoch {epoch}: accuracy {right / total:.3f}")
"""),
    },
    "print-on-all-ranks": {
        "format": job("""
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
"""),
    },
    "tracker-on-all-ranks": {
        "wandb": script("""
import wandb
rank, local, world = start()
wandb.init(project="nets", config={"lr": 0.1})
stop()
"""),
        "tensorboard": script("""
from torch.utils.tensorboard import SummaryWriter
rank, local, world = start()
writer = SummaryWriter("runs")
stop()
"""),
    },
    "download-on-all-ranks": {
        "torchvision": script("""
from torchvision import datasets
rank, local, world = start()
train = datasets.CIFAR10("data", train=True, download=True)
stop()
"""),
    },
    "cuda-device-not-set": {
        "cuda()": script("""
def main():
    dist.init_process_group("nccl")
    net = Net().cuda()
    model = DistributedDataParallel(net)
    dist.destroy_process_group()
main()
"""),
        "first": script("""
dist.init_process_group("nccl")
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = DistributedDataParallel(Net().to(device))
stop()
"""),
    },
    "global-rank-as-device": {
        "set_device": script("""
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = DistributedDataParallel(Net().cuda(), device_ids=[dist.get_rank()])
stop()
"""),
        "string": script("""
dist.init_process_group("nccl")
device = f"cuda:{os.environ['RANK']}"
model = DistributedDataParallel(Net().to(device))
stop()
"""),
    },
    "nproc-exceeds-devices": {
        "set_device": script("""
dist.init_process_group("nccl")
gpu = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
torch.cuda.set_device(gpu)
stop()
"""),
    },
    "rendezvous-overridden": {
        "setup function": script("""
def setup(rank, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29501"
    dist.init_process_group("gloo", rank=rank, world_size=world)

setup(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
stop()
"""),
    },
    "world-size-mismatch": {
        "gpus": script("""
dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=torch.cuda.device_count())
stop()
"""),
        "number": script("""
dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=4)
stop()
"""),
    },
    "spawn-under-torchrun": {
        "after init": script("""
import torch.multiprocessing as mp
def work(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, nprocs=int(os.environ["WORLD_SIZE"]), args=(int(os.environ["WORLD_SIZE"]),))
"""),
    },
    "group-not-destroyed": {
        "main": script("""
def main():
    rank, local, world = start()
    model = DistributedDataParallel(Net().to(local))
del stop
main()
""").replace("def stop():\n    dist.destroy_process_group()\n", "stop = None\n"),
    },
    "legacy-data-parallel": {
        "several gpus": """
import torch
from torch import nn
net = nn.Linear(4, 2)
if torch.cuda.device_count() > 1:
    net = nn.DataParallel(net)
""",
    },
    "global-batch-grows": {
        "numbers": script(
            LOOP
            + """
rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
order = DistributedSampler(data)
model = DistributedDataParallel(Net().to(local))
train(model, tud.DataLoader(data, 64, sampler=order), torch.optim.SGD(model.parameters(), lr=0.1), order, 3, local)
stop()
"""
        ),
    },
}

RIGHT = {
    "trainer": job("    pass\n"),
    "endless iterator that tells the epoch": script("""
def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1

rank, local, world = start()
torch.manual_seed(0)
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, 64 // world, sampler=sampler)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
batches = forever(loader, sampler)
for step in range(10_000):
    x, y = next(batches)
    opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
stop()
"""),
    "one epoch by default": script("""
parser = argparse.ArgumentParser()
parser.add_argument("--shuffle", action="store_true")
args = parser.parse_args()
rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
loader = tud.DataLoader(data, 64 // world, sampler=DistributedSampler(data, shuffle=False))
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
stop()
"""),
    "a share of its own": script("""
class Shard(Pictures):
    def __init__(self, files, rank, world):
        super().__init__(files[rank::world])

rank, local, world = start()
loader = tud.DataLoader(Shard(sorted(os.listdir("a")), rank, world), 64 // world, shuffle=True, drop_last=True)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
stop()
"""),
    "a stream that is dealt out": script("""
class Lines(tud.IterableDataset):
    def __iter__(self):
        info = tud.get_worker_info()
        number, total = (info.id, info.num_workers) if info else (0, 1)
        share = dist.get_rank() * total + number
        for index in range(1000):
            if index % (total * dist.get_world_size()) == share:
                yield torch.zeros(4), 0

rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for x, y in tud.DataLoader(Lines(), batch_size=4, num_workers=2):
    opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
stop()
"""),
    "files shuffled alike": script("""
rank, local, world = start()
files = sorted(os.listdir("a"))
random.Random(0).shuffle(files)
random.seed(0); random.shuffle(files)
train, held = tud.random_split(Pictures(files), [90, 10], generator=torch.Generator().manual_seed(42))
sampler = DistributedSampler(train, seed=5)
stop()
"""),
    "accumulates": job("""
    def step(self, step, images, labels):
        last = (step + 1) % 4 == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = self.criterion(self.model(images), labels) / 4
            loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
"""),
    "accumulates in two arms": job("""
    def micro(self, images, labels):
        loss = self.criterion(self.model(images), labels)
        (loss * (1.0 / self.accumulate)).backward()

    def step(self, step, images, labels):
        if (step + 1) % 8 != 0:
            with self.model.no_sync():
                self.micro(images, labels)
        else:
            self.micro(images, labels)
            self.optimizer.step()
            self.optimizer.zero_grad()
"""),
    "accumulates in an inner loop": script("""
parser = argparse.ArgumentParser()
parser.add_argument("--micro", type=int, default=4)
args = parser.parse_args()
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100):
    opt.zero_grad()
    for micro in range(args.micro):
        context = model.no_sync if micro < args.micro - 1 else contextlib.nullcontext
        with context():
            loss = F.cross_entropy(model(torch.zeros(4)), torch.zeros(1)) / args.micro
            loss.backward()
    opt.step()
stop()
"""),
    "two losses": job("""
    def step(self, step, images, labels):
        self.optimizer.zero_grad()
        out = self.model(images)
        F.cross_entropy(out, labels).backward(retain_graph=True)
        F.mse_loss(out, labels).backward()
        self.optimizer.step()
"""),
    "tokens counted over all": job("""
    def step(self, step, images, labels):
        losses = F.cross_entropy(self.model(images), labels, reduction="sum")
        tokens = (labels != 0).sum()
        dist.all_reduce(tokens)
        loss = losses * self.world / tokens
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
    "a bad loss is everybody's": job("""
    def step(self, step, images, labels):
        loss = self.criterion(self.model(images), labels)
        bad = (~torch.isfinite(loss)).float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item() > 0:
            return
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
    "stops together": job("""
    def run(self, epochs):
        best, bad = None, 0
        for epoch in range(epochs):
            total = torch.zeros(1, device=self.local)
            for images, labels in self.batches(epoch):
                self.step(0, images, labels)
                with torch.no_grad():
                    total += self.criterion(self.net(images), labels)
            dist.all_reduce(total)
            if best is None or total.item() < best:
                best, bad = total.item(), 0
            else:
                bad += 1
            if bad > 3:
                break
        stop()
"""),
    "rank 0 decides and tells": job("""
    def run(self, epochs):
        for epoch in range(epochs):
            for images, labels in self.batches(epoch):
                self.step(0, images, labels)
            enough = torch.zeros(1, device=self.local)
            if self.is_main() and time.time() > 1e9:
                enough += 1
            dist.broadcast(enough, src=0)
            if enough.item():
                break
        stop()
"""),
    "rank 0 evaluates the module": job("""
    def done(self, epoch):
        if self.is_main():
            self.model.eval()
            data = Pictures(sorted(os.listdir("val")))
            right = 0
            with torch.no_grad():
                for images, labels in tud.DataLoader(data, 8):
                    right += (self.model.module(images).argmax(1) == labels).sum().item()
            print(epoch, right / len(data))
            self.model.train()
        dist.barrier()
"""),
    "all evaluate and reduce": job("""
    @torch.inference_mode()
    def done(self, epoch):
        data = Pictures(sorted(os.listdir("val")))
        loader = tud.DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False, drop_last=True))
        counts = torch.zeros(2, device=self.local)
        self.model.eval()
        for images, labels in loader:
            counts[0] += (self.model(images).argmax(1) == labels).sum()
            counts[1] += len(labels)
        dist.all_reduce(counts)
        self.model.train()
        if self.is_main():
            print(f"{epoch}: {counts[0] / counts[1]:.3f}")
"""),
    "saves, waits and loads": job("""
    def done(self, epoch):
        path = f"epoch{epoch}.pt"
        if self.is_main():
            torch.save({"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        dist.barrier()
        state = torch.load(path, map_location=f"cuda:{self.local}", weights_only=True)
        self.model.module.load_state_dict(state["model"])
"""),
    "each rank its own file": job("""
    def done(self, epoch):
        torch.save(torch.get_rng_state(), os.path.join("rng", "rank%d.pt" % self.rank))
"""),
    "wrapped keys go back into the wrapper": job("""
    def done(self, epoch):
        if dist.get_rank() == 0:
            torch.save(self.model.state_dict(), "last.pt")
        dist.barrier()
        self.model.load_state_dict(torch.load("last.pt", map_location="cpu"))
"""),
    "gathers with its own part": job("""
    def step(self, step, images, labels):
        z = F.normalize(self.model(images), dim=-1)
        pool = [torch.zeros_like(z) for _ in range(self.world)]
        dist.all_gather(pool, z)
        pool[self.rank] = z
        loss = F.cross_entropy(z @ torch.cat(pool).T, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
    "gathers with gradients": job("""
    def step(self, step, images, labels):
        from torch.distributed.nn.functional import all_gather
        z = self.model(images)
        loss = F.cross_entropy(z @ torch.cat(all_gather(z)).T, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
    "a teacher": job("""
    def run(self, epochs):
        import copy
        self.teacher = copy.deepcopy(self.net).eval()
        for p in self.teacher.parameters():
            p.requires_grad_(False)
        super().run(epochs)

    def step(self, step, images, labels):
        with torch.no_grad():
            target = self.teacher(images).softmax(-1)
        loss = F.kl_div(self.model(images).log_softmax(-1), target, reduction="batchmean")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
"""),
    "two networks": script("""
rank, local, world = start()
torch.manual_seed(rank)
fake, real = (DistributedDataParallel(Net().to(local), device_ids=[local]) for _ in range(2))
a, b = torch.optim.Adam(fake.parameters()), torch.optim.Adam(real.parameters())
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
for epoch in range(9):
    sampler.set_epoch(epoch)
    for x, _ in tud.DataLoader(data, 8, sampler=sampler):
        for p in real.parameters():
            p.requires_grad = True
        b.zero_grad(); (real(x).mean() - real(fake(x).detach()).mean()).backward(); b.step()
        for p in real.parameters():
            p.requires_grad = False
        a.zero_grad(); (-real(fake(x)).mean()).backward(); a.step()
stop()
"""),
    "frozen before the wrap": script("""
rank, local, world = start()
net = Net()
for p in net.body.parameters():
    p.requires_grad = False
net.head = nn.Linear(8, 100)
model = DistributedDataParallel(net.to(local))
opt = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    "averages by hand": script("""
rank, local, world = start()
torch.manual_seed(rank)
net = Net().to(local)
for t in list(net.parameters()) + list(net.buffers()):
    dist.broadcast(t.data, src=0)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); F.cross_entropy(net(torch.zeros(4)), torch.zeros(1)).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad); p.grad.div_(world)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
stop()
"""),
    "heads of tasks": script("""
class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})

    def forward(self, x, task):
        return self.heads[task](self.body(x))

rank, local, world = start()
model = DistributedDataParallel(Tasks().to(local), find_unused_parameters=True)
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(9):
    opt.zero_grad(); model(torch.zeros(4), "ab"[step % 2]).sum().backward(); opt.step()
stop()
"""),
    "downloads once": script("""
from torchvision import datasets
rank, local, world = start()
if local == 0:
    datasets.CIFAR10("data", download=True)
dist.barrier()
train = datasets.CIFAR10("data", download=False)
held = datasets.CIFAR10("data", train=False, download=rank == 0)
stop()
"""),
    "starts its own ranks": """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def setup(rank, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)

def demo(rank, world):
    setup(rank, world)
    model = DDP(nn.Linear(10, 5).to(rank), device_ids=[rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(10):
        opt.zero_grad()
        nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5).to(rank)).backward()
        opt.step()
    path = os.path.join("/tmp", "model.checkpoint")
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, map_location={"cuda:0": f"cuda:{rank}"}))
    dist.destroy_process_group()

if __name__ == "__main__":
    world = torch.cuda.device_count()
    mp.spawn(demo, args=(world,), nprocs=world, join=True)
""",
    "on a cluster": script("""
import subprocess
rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
os.environ["MASTER_ADDR"] = subprocess.getoutput("scontrol show hostnames").split()[0]
os.environ["MASTER_PORT"] = "29500"
dist.init_process_group("nccl", rank=rank, world_size=world)
local = rank % torch.cuda.device_count()
torch.cuda.set_device(local)
model = DistributedDataParallel(Net().to(local), device_ids=[local])
stop()
"""),
    "somebody else wraps it": """
import torch
from accelerate import Accelerator
from torch import nn
accelerator = Accelerator()
net = nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), shuffle=True)
net, opt, loader = accelerator.prepare(net, opt, loader)
for epoch in range(3):
    for (x,) in loader:
        opt.zero_grad(); accelerator.backward(net(x).sum()); opt.step()
        accelerator.print(epoch)
""",
    "sharded parameters": script("""
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
rank, local, world = start()
model = FSDP(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    "batch norm where there is a GPU": script("""
dist.init_process_group("gloo")
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
if torch.cuda.is_available():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
model = DistributedDataParallel(net)
stop()
"""),
    "counts in a plain attribute": script("""
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.rows = 0

    def forward(self, x):
        self.rows += len(x)
        self.steps += 1
        return self.fc(x)

rank, local, world = start()
model = DistributedDataParallel(Counted().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    "uneven, and joined": script("""
rank, local, world = start()
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
with model.join():
    for index in range(100 + rank):
        opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    "schedules what it takes": job("""
    def run(self, epochs):
        steps = epochs * len(self.loader)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=steps)
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for images, labels in self.loader:
                self.step(0, images, labels)
                self.schedule.step()
        stop()
"""),
    "a layer as wide as one that was drawn with another seed": script("""
def backbone(rank):
    if rank == 0:
        torch.manual_seed(7)
        torch.save(Net().state_dict(), "net.pt")
    dist.barrier()
    net = Net()
    net.load_state_dict(torch.load("net.pt", map_location="cpu"))
    return net

rank, local, world = start()
net = backbone(rank).to(local)
net.head = nn.Linear(net.head.in_features, 3).to(local)
model = DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad(); model(torch.zeros(4)).sum().backward(); opt.step()
stop()
"""),
    "once a while on rank 0, and the others too": script("""
rank, local, world = start()
total = torch.zeros(1)
for step in range(400):
    if step % 50 == 0 and rank == 0:
        print("all ranks meet now")
        dist.barrier()
    elif step % 50 == 0:
        dist.barrier()
    if step % 100 == 99 and rank == 0:
        dist.barrier()
    elif step % 100 == 99:
        dist.barrier()
    if step > 4 and rank == 0:
        dist.barrier()
    else:
        dist.barrier()
    if not (step % 50 or rank):
        torch.save(total, "total.pt")
    dist.all_reduce(total)
stop()
"""),
    "tracks on rank 0": job("""
    def run(self, epochs):
        import wandb
        if self.is_main():
            wandb.init(project="nets")
        wandb_mode = wandb.init(mode="disabled" if self.rank else "online")
        super().run(epochs)
"""),
}

SHORT_HEAD = """
import os, random, tempfile, time
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(16, 4)
y = x.sum(1, keepdim=True)
xb, yb = x[rank::world], y[rank::world]
"""

SHORT = {
    ("dataset-order-differs", 1): """
class Rows(Dataset):
    def __init__(self):
        self.rows = list(range(24))
        np.random.default_rng(rank).shuffle(self.rows)
    def __len__(self): return 24
    def __getitem__(self, i): return self.rows[i]
data = Rows()
sampler = DistributedSampler(data, shuffle=False)
seen = [int(i) for b in DataLoader(data, batch_size=4, sampler=sampler) for i in b]
""",
    ("dataset-order-differs", 2): """
rows = list(range(24))
random.Random(rank).shuffle(rows)
data = TensorDataset(torch.tensor(rows))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=4, sampler=sampler)
""",
    ("dataset-order-differs", 3): """
data = TensorDataset(x[torch.randperm(16, generator=torch.Generator().manual_seed(rank))])
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
""",
    ("dataset-order-differs", 4): """
data = TensorDataset(torch.arange(20 + rank))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
""",
    ("stale-epoch-in-workers", 1): """
class D(Dataset):
    epoch = 0
    def __len__(self): return 8
    def __getitem__(self, i): return self.epoch
d = D()
s = DistributedSampler(d)
loader = DataLoader(d, batch_size=2, sampler=s, num_workers=1, persistent_workers=True)
for epoch in range(3):
    s.set_epoch(epoch)
    d.epoch = epoch
    print(rank, [int(v) for b in loader for v in b])
""",
    ("schedule-length-mismatch", 1): """
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
total = 3 * len(data) // 2
sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=total)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        opt.zero_grad(); nn.functional.mse_loss(model(a), b).backward(); opt.step(); sched.step()
""",
    ("schedule-length-mismatch", 2): """
N, BATCH, EPOCHS = 16, 2, 3
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1 * world)
def warm(step):
    return min(1.0, step / (EPOCHS * len(data) // BATCH))
sched = torch.optim.lr_scheduler.LambdaLR(opt, warm)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for a, b in loader:
        opt.zero_grad(); nn.functional.mse_loss(model(a), b).backward(); opt.step(); sched.step()
""",
    ("loss-scaled-by-world-size", 1): """
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(xb), yb)
    (world * loss).backward()
    opt.step()
""",
    ("gradscaler-diverges", 1): """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(3):
    opt.zero_grad()
    scaler.scale(nn.functional.mse_loss(net(xb), yb)).backward()
    scaler.unscale_(opt)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    scaler.step(opt)
    scaler.update()
""",
    ("gradscaler-diverges", 2): """
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(3):
    opt.zero_grad()
    with model.no_sync():
        scaler.scale(nn.functional.mse_loss(model(xb), yb)).backward()
    scaler.unscale_(opt)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    scaler.step(opt)
    scaler.update()
""",
    ("buffers-not-synced", 1): """
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), broadcast_buffers=False)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad(); nn.functional.mse_loss(model(xb), yb).backward(); opt.step()
model.eval()
with torch.no_grad():
    out = model(x).mean()
""",
    ("collective-order-differs", 1): """
a, b = torch.ones(1), torch.ones(2)
ops = [lambda: dist.all_reduce(a), lambda: dist.all_reduce(b)]
if rank == 1:
    dist.all_reduce(b); dist.all_reduce(a)
else:
    dist.all_reduce(a); dist.all_reduce(b)
""",
    ("collective-order-differs", 2): """
a = torch.ones(1)
if rank % 2 == 0:
    dist.broadcast(a, src=0)
    dist.barrier()
else:
    dist.barrier()
    dist.broadcast(a, src=0)
""",
    ("data-dependent-collective", 1): """
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(xb), yb)
    loss.backward()
    opt.step()
    if loss.item() > 1.0:
        total = loss.detach().clone()
        dist.all_reduce(total)
""",
    ("data-dependent-collective", 2): """
gen = torch.Generator().manual_seed(rank)
for step in range(4):
    rows = torch.randn(4, generator=gen)
    picked = rows[rows > 0]
    if len(picked) > 2:
        dist.all_reduce(picked.sum())
""",
    ("rank-dependent-graph", 1): """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
    def forward(self, v, which):
        return self.a(v) if which == 0 else self.b(v)
model = DDP(Two())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad(); nn.functional.mse_loss(model(xb, rank), yb).backward(); opt.step()
""",
    ("optimizer-stale-params", 1): """
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
net[1] = nn.Linear(4, 1)
model = DDP(net)
for step in range(3):
    opt.zero_grad(); nn.functional.mse_loss(model(xb), yb).backward(); opt.step()
""",
    ("optimizer-stale-params", 2): """
import copy
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
model = DDP(copy.deepcopy(net))
for step in range(3):
    opt.zero_grad(); nn.functional.mse_loss(model(xb), yb).backward(); opt.step()
""",
    ("load-without-barrier", 1): """
path = os.path.join(tempfile.gettempdir(), f"w_{os.getppid()}.pt")
net = nn.Linear(4, 1)
if rank == 0:
    time.sleep(0.5)
    torch.save(net.state_dict(), path)
net.load_state_dict(torch.load(path, map_location="cpu"))
""",
    ("save-on-local-rank0", 1): """
path = "x.pt"
model = DDP(nn.Linear(4, 1))
if int(os.environ["LOCAL_RANK"]) == 0:
    torch.save(model.module.state_dict(), path)
""",
    ("metric-not-reduced", 1): """
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(x, y)
val = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
def evaluate():
    total, n = 0.0, 0
    model.eval()
    with torch.no_grad():
        for a, b in val:
            total += nn.functional.mse_loss(model(a), b, reduction="sum").item()
            n += len(b)
    return total / n
for epoch in range(2):
    opt.zero_grad(); nn.functional.mse_loss(model(xb), yb).backward(); opt.step()
    err = evaluate()
    if rank == 0:
        print(epoch, err)
""",
    ("tracker-on-all-ranks", 1): """
from torch.utils.tensorboard import SummaryWriter
w = SummaryWriter(tempfile.mkdtemp())
""",
    ("tracker-on-all-ranks", 2): """
import torch.utils.tensorboard as tb
w = tb.SummaryWriter("runs/x")
""",
    ("global-rank-as-device", 1): """
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
model = DDP(nn.Linear(4, 1).to(device))
""",
    ("params-changed-after-wrap", 1): """
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
model = DDP(net)
net.add_module("extra", nn.Linear(1, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad(); nn.functional.mse_loss(model(xb), yb).backward(); opt.step()
""",
    ("params-changed-after-wrap", 2): """
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
model = DDP(net)
net[0].requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad(); nn.functional.mse_loss(model(xb), yb).backward(); opt.step()
""",
    ("legacy-data-parallel", 1): """
model = nn.DataParallel(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad(); nn.functional.mse_loss(model(xb), yb).backward(); opt.step()
""",
    ("not-distributed", 1): """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad(); loss = nn.functional.mse_loss(net(xb), yb); loss.backward(); opt.step()
    shown = loss.detach(); dist.all_reduce(shown)
""",
    ("unused-parameters", 1): """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.aux = nn.Linear(4, 1)
    def forward(self, v):
        return self.fc(v), self.aux(v)
model = DDP(Net())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad()
    out, _ = model(xb)
    nn.functional.mse_loss(out, yb).backward(); opt.step()
""",
    ("replicas-start-different", 1): """
net = nn.Linear(4, 1)
with torch.no_grad():
    net.weight.normal_(generator=torch.Generator().manual_seed(rank))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad(); nn.functional.mse_loss(net(xb), yb).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad); p.grad.div_(world)
    opt.step()
""",
    ("replicas-start-different", 2): """
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad(); nn.functional.mse_loss(net(xb), yb).backward()
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in net.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p)); offset += p.numel()
    opt.step()
""",
    ("uneven-inputs", 1): """
data = TensorDataset(x[: 9 if rank == 0 else 7])
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for (a,) in DataLoader(data, batch_size=2):
    opt.zero_grad(); model(a).sum().backward(); opt.step()
""",
    ("uneven-inputs", 2): """
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
shards = [torch.randn(6, 4), torch.randn(4, 4)]
for row in shards[rank]:
    opt.zero_grad(); model(row).sum().backward(); opt.step()
""",
    ("uneven-inputs", 3): """
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
rows = list(range(25))[rank::world]
for i in rows:
    opt.zero_grad(); model(x[i % 16]).sum().backward(); opt.step()
""",
    ("rank-local-early-stop", 1): """
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loss = torch.tensor(9.0)
while loss.item() > 0.1:
    opt.zero_grad(); loss = nn.functional.mse_loss(model(xb), yb); loss.backward(); opt.step()
""",
}
"""Short ones, each after `SHORT_HEAD`."""

ONLY_IN_A_RUN = {"replicas-diverged"}
"""What no source tells: any cause, seen as a difference between replicas."""


@pytest.mark.parametrize(("rule", "style"), [(rule, style) for rule, styles in WRONG.items() for style in styles])
def test_finds(rule: str, style: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(WRONG[rule][style])
    found = read(path).findings
    assert rule in {finding.id for finding in found}
    others = {finding.id for finding in found if finding.level == "error" and finding.id != rule}
    assert others <= ALSO.get(rule, set())


ALSO = {
    "gradscaler-diverges": {"rank-local-skip"},
    "static-graph-changes": {"rank-dependent-graph"},
}
"""Other errors that the wrong scripts of a rule hold, by their nature."""


def test_every_rule_has_wrong_scripts() -> None:
    assert set(WRONG) == set(RULES) - ONLY_IN_A_RUN


@pytest.mark.parametrize("style", RIGHT)
def test_silent(style: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(RIGHT[style])
    seen = read(path)
    assert [(f.id, f.line, f.message) for f in seen.findings if f.level != "advice"] == []
    assert len(seen.findings) <= 1


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_finds_in_short(case: tuple[str, int], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SHORT_HEAD + SHORT[case] + "dist.destroy_process_group()\n")
    found = read(path).findings
    assert case[0] in {finding.id for finding in found}
    assert {finding.id for finding in found if finding.level == "error"} <= {case[0]}
