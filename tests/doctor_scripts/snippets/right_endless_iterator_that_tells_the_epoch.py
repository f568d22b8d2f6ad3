# expect: clean
from pieces import *


def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


rank, local, world = start()
torch.manual_seed(0)
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, 64 // world, sampler=sampler)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
batches = forever(loader, sampler)
for step in range(10_000):
    x, y = next(batches)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
stop()
