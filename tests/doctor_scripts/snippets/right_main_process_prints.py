# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def average(self):
        pair = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(pair)
        return (pair[0] / pair[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        meter = Meter()
        for step, (x, y) in enumerate(DataLoader(data, batch_size=8, sampler=sampler)):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.update(loss.item(), len(x))
            if rank == 0 and step % 2 == 0:
                print(f"epoch {epoch} step {step}: {loss.item():.3f} here")
        average = meter.average()
        if rank == 0:
            print(f"epoch {epoch}: {average:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
