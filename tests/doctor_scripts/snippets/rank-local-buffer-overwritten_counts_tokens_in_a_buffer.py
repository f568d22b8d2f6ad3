# expect: rank-local-buffer-overwritten
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Counting(nn.Module):
    def __init__(self, words=20):
        super().__init__()
        self.embedding, self.out = nn.Embedding(words, 8), nn.Linear(8, words)
        self.register_buffer("seen", torch.zeros(words))

    def forward(self, ids):
        if self.training:
            self.seen.index_add_(0, ids.flatten(), torch.ones(ids.numel()))
        return self.out(self.embedding(ids)) - self.seen.clamp(min=1).log()


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randint(0, 20, (64, 9)))
    sampler = DistributedSampler(data)
    model = DDP(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (ids,) in DataLoader(data, batch_size=8, sampler=sampler):
            logits = model(ids[:, :-1])
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:]).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
