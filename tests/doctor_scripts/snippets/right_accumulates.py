# expect: clean
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Accumulator:
    def __init__(self, model, optimizer, every):
        self.model, self.optimizer, self.every, self.count = model, optimizer, every, 0

    def __call__(self, x, y):
        self.count += 1
        last = self.count % self.every == 0
        with contextlib.ExitStack() as stack:
            if not last:
                stack.enter_context(self.model.no_sync())
            loss = nn.functional.mse_loss(self.model(x), y).div(self.every)
            loss.backward()
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    step = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            step(x, y)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
