# expect: clean
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_teacher(teacher, data):
    optimizer = torch.optim.Adam(teacher.parameters())
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(teacher(x), y).backward()
        optimizer.step()


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 5), torch.randn(64, 1))
teacher = torch.nn.Linear(5, 1)
if dist.get_rank() == 0:
    train_teacher(teacher, data)
for parameter in teacher.parameters():
    dist.broadcast(parameter.data, src=0)
model = DistributedDataParallel(torch.nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, _ in loader:
        with torch.no_grad():
            told = teacher(x)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), told).backward()
        optimizer.step()
dist.destroy_process_group()
