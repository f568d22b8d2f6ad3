# expect: accumulation-not-normalised
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, every):
        self.every, self.micro_step = every, 0
        self.model = DDP(nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.micro_step += 1
        if self.micro_step % self.every == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    trainer = Trainer(every=4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            trainer.step(x, y)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
