# expect: unequal-weight-average
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def masked_mean(losses, mask):
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 10, 8), torch.randn(64, 10, 1), torch.rand(64, 10) < 0.5)
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y, mask in DataLoader(data, batch_size=8, sampler=sampler):
            errors = nn.functional.mse_loss(model(x), y, reduction="none").squeeze(-1)
            loss = masked_mean(errors, mask.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
