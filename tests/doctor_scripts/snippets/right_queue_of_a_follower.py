# expect: clean
import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Contrast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(5, 3)
        self.follower = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", torch.randn(32, 3))

    def forward(self, x):
        queries = self.encoder(x)
        scores = queries @ self.queue.clone().t()
        with torch.no_grad():
            keys = self.follower(x)
            everybodys = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
            dist.all_gather(everybodys, keys)
            new = torch.cat(everybodys)
            self.queue[: len(new)] = new
        return scores


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 5))
model = DistributedDataParallel(Contrast(), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).logsumexp(1).mean().backward()
        optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "contrast.pt")
dist.barrier()
dist.destroy_process_group()
