# expect: clean
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
maker = DistributedDataParallel(torch.nn.Linear(3, 5))
critic = DistributedDataParallel(torch.nn.Linear(5, 1))
of_maker = torch.optim.Adam(maker.parameters())
of_critic = torch.optim.Adam(critic.parameters())
data = TensorDataset(torch.randn(64, 5))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
noise = torch.Generator().manual_seed(dist.get_rank())
turn = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        if turn % 2 == 0:
            with torch.no_grad():
                made = maker.module(torch.randn(8, 3, generator=noise))
            scores = critic(torch.cat([real, made]))
            of_critic.zero_grad()
            (scores[8:].mean() - scores[:8].mean()).backward()
            of_critic.step()
        made = maker(torch.randn(8, 3, generator=noise))
        of_maker.zero_grad()
        (-critic.module(made).mean()).backward()
        of_maker.step()
        turn += 1
dist.destroy_process_group()
