# expect: clean
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tied(nn.Module):
    def __init__(self, words=20, width=8):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.layers = [self.first, self.second]
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids):
        h = self.embedding(ids)
        for layer in self.layers:
            h = h + layer(self.norm(h))
        return nn.functional.linear(h, self.embedding.weight)


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randint(0, 20, (64, 9)))
    sampler = DistributedSampler(data)
    model = DDP(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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
