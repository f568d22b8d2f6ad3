# expect: clean
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
scores = torch.zeros(8)
for seed in range(rank, 8, world):
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.randn(9, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scores[seed] = loss.item()
dist.all_reduce(scores)
dist.destroy_process_group()
