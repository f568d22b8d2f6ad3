# expect: load-without-barrier
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BEST = "best.pt"


def keep(model, best, loss):
    if loss < best and dist.get_rank() == 0:
        torch.save(model.module.state_dict(), BEST)
    return min(best, loss)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = float("inf")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        best = keep(model, best, total.item())
    model.module.load_state_dict(torch.load(BEST, map_location="cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
