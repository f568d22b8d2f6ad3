# expect: unsynced-optimizer-step
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for index, (x, y) in enumerate(loader, start=1):
            model.require_sync = index % ACCUMULATE == 0
            if index % ACCUMULATE != 0:
                with model.no_sync():
                    (nn.functional.mse_loss(model(x), y) / ACCUMULATE).backward()
            else:
                (nn.functional.mse_loss(model(x), y) / ACCUMULATE).backward()
            if index % ACCUMULATE == 0 or index == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
