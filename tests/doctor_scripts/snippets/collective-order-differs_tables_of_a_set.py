# expect: collective-order-differs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NAMES = {"loss", "accuracy", "margin"}


class Totals:
    def __init__(self):
        self.values = dict.fromkeys(NAMES)
        for name in NAMES:
            self.values[name] = torch.zeros(1)

    def reduce(self):
        for name in NAMES:
            dist.all_reduce(self.values[name])
        return self.values


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        totals = Totals()
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals.values["loss"] += loss.detach()
        totals.reduce()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
