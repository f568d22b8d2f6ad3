# expect: gather-without-grad
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def concat_all(tensor):
    parts = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts, dim=0)


class InfoNCE(nn.Module):
    def forward(self, a, b):
        logits = concat_all(a) @ concat_all(b).T / 0.1
        return nn.functional.cross_entropy(logits, torch.arange(len(logits)))


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(8, 4))
    loss_fn = InfoNCE()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(data, batch_size=8, sampler=sampler):
            both = model(torch.cat([a, b]))
            loss = loss_fn(*both.chunk(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
