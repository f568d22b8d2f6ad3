# expect: replicas-diverged
from pieces import *

rank, local, world = start()
torch.manual_seed(0)
data = tud.TensorDataset(torch.zeros(100, 4), torch.zeros(100, 1))
held_out = tud.TensorDataset(torch.zeros(40, 4), torch.zeros(40, 1))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
val_loader = tud.DataLoader(held_out, batch_size=8, sampler=DistributedSampler(held_out, shuffle=False))
all_loader = tud.DataLoader(held_out, batch_size=8)
model = DistributedDataParallel(nn.Linear(4, 1).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
best, state = float("inf"), None


def validate(loader, reduce):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            total[0] += nn.functional.mse_loss(model(x), y, reduction="sum")
            total[1] += len(x)
    if reduce:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        scheduler.step(validate(all_loader, False))
stop()
