# expect: no-sync-forward-outside
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, every):
        self.model, self.every = DDP(model), every
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self, loss, last):
        if last:
            loss.backward()
        else:
            with self.model.no_sync():
                loss.backward()

    def fit(self, loader):
        for index, (x, y) in enumerate(loader):
            last = (index + 1) % self.every == 0
            loss = nn.functional.mse_loss(self.model(x), y) / self.every
            self.backward(loss, last)
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    trainer = Trainer(nn.Linear(8, 1), every=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        trainer.fit(DataLoader(data, batch_size=8, sampler=sampler))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
