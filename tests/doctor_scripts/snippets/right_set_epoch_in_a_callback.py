# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Callback:
    def on_epoch_start(self, trainer):
        pass


class Shuffles(Callback):
    def on_epoch_start(self, trainer):
        trainer.loader.sampler.set_epoch(trainer.epoch)


class Trainer:
    def __init__(self, model, loader, callbacks=()):
        self.model, self.loader, self.callbacks, self.epoch = DDP(model), loader, list(callbacks), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def call(self, hook):
        for callback in self.callbacks:
            getattr(callback, hook)(self)

    def fit(self, epochs):
        while self.epoch < epochs:
            self.call("on_epoch_start")
            for x, y in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
            self.epoch += 1


if __name__ == "__main__":
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    Trainer(nn.Linear(8, 1), DataLoader(data, batch_size=8, sampler=DistributedSampler(data)), [Shuffles()]).fit(2)
    dist.destroy_process_group()
