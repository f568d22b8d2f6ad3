# expect: clean
from pieces import *

rank, local, world = start()
torch.manual_seed(0)
data = tud.TensorDataset(torch.zeros(100, 4), torch.zeros(100, 1))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad.div_(world)
            dist.all_reduce(p.grad)
        optimizer.step()
stop()
