"""The loop, and what it saves."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.device = f"cuda:{self.local_rank}" if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        dist.barrier()  # nobody writes one before all have looked
        self.model = DistributedDataParallel(self.model)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location=self.device)
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]
        self._say(f"resuming at epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": epoch + 1,
        }
        torch.save(snapshot, self.snapshot_path)
        self._say(f"epoch {epoch}: saved to {self.snapshot_path}")

    def _say(self, text):
        if self.global_rank == 0:
            print(text)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.smooth_l1_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        total = torch.zeros((), device=self.device)
        for source, targets in self.train_data:
            total += self._run_batch(source.to(self.device), targets.to(self.device))
        mean = total / len(self.train_data)
        dist.all_reduce(mean)
        self._say(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)
