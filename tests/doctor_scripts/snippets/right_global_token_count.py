# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PAD = 0


def token_loss(logits, targets):
    summed = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
    count = (targets != PAD).sum()
    dist.all_reduce(count)
    return summed * dist.get_world_size() / count


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randint(0, 20, (64, 9)))
    sampler = DistributedSampler(data)
    model = DDP(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (ids,) in DataLoader(data, batch_size=8, sampler=sampler):
            loss = token_loss(model(ids[:, :-1]), ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
