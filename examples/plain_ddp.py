"""The foil: the same little job as `tiny.yaml`, in plain PyTorch as people write it. Its result moves with the workers.

    torchrun --nproc_per_node=2 examples/plain_ddp.py examples/tiny.yaml

`DistributedDataParallel`, `DistributedSampler`, one seed everywhere, the same model, data, global batch, optimizer and
schedule. Nothing in it is a mistake. The last line printed is the digest of the final weights.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: first imported by DDP, after init_process_group, it would keep the group alive
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from paceline.determinism import digest
from paceline.optim import build_optimizer, learning_rate, peak_lr
from paceline.parsing import parse


def main() -> None:
    settings = parse(sys.argv[1:])
    recipe, task = settings.recipe, settings.task.make()
    torch.set_num_threads(recipe.threads)
    dist.init_process_group("gloo")
    torch.manual_seed(recipe.seed)
    model = DistributedDataParallel(task.build_model())
    peak = peak_lr(recipe.optimizer, recipe.batch)
    optimizer = build_optimizer(model, recipe.optimizer, batch=recipe.batch)
    data = task.train_data()
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=recipe.seed)
    loader = DataLoader(data, batch_size=recipe.batch // dist.get_world_size(), sampler=sampler)

    assert recipe.steps is not None
    step, epoch = 0, 0
    while step < recipe.steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            loss, weight = task.loss(model, batch)
            optimizer.zero_grad()
            (loss / weight).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm or float("inf"))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe.schedule, peak, step, recipe.steps)
            if norm.isfinite():
                optimizer.step()
            step += 1
            if step == recipe.steps:
                break
        epoch += 1
    if dist.get_rank() == 0:
        print(f"workers={dist.get_world_size()} digest={digest(model.module.state_dict())}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
