# expect: clean
import torch
import torch.distributed as dist

PERIOD = 3


def average(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(5, 1)
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    optimizer.zero_grad()
    model(torch.randn(9, 5)).square().mean().backward()
    if step < 4:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()
    if step >= 4 and step % PERIOD == 0:
        average(model.parameters())
dist.destroy_process_group()
