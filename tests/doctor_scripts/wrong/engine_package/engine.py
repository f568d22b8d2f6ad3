"""The loop and its checkpoints."""

import os

import torch
from torch import nn


class CheckpointManager:
    def __init__(self, folder, keep=2):
        self.folder, self.keep, self.written = folder, keep, []
        os.makedirs(folder, exist_ok=True)

    def write(self, name, **state):
        path = os.path.join(self.folder, f"{name}.pt")
        torch.save(state, path)  # expect: save-on-all-ranks
        self.written.append(path)


class Engine:
    def __init__(self, model, data, optimizer, checkpoints, log):
        self.model, self.data, self.optimizer = model, data, optimizer
        self.checkpoints, self.log = checkpoints, log

    def fit(self, epochs):
        loader = self.data.train_loader()
        for epoch in range(epochs):
            self.train_epoch(loader)
            self.log(f"finished epoch {epoch}")
            self.on_epoch_end(epoch)

    def train_epoch(self, loader):
        for x, y in loader:  # expect: missing-set-epoch
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()

    def on_epoch_end(self, epoch):
        self.checkpoints.write(f"epoch{epoch}", model=self.model.module.state_dict(), epoch=epoch)
