# expect: missing-set-epoch
from pieces import *

rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, 4, sampler=sampler)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
it = iter(loader)
for step in range(10_000):
    try:
        x, y = next(it)
    except StopIteration:
        it = iter(loader)
        x, y = next(it)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
stop()
