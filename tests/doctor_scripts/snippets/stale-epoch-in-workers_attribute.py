# expect: stale-epoch-in-workers
from pieces import *

rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
loader = tud.DataLoader(data, 4, sampler=sampler, num_workers=4, persistent_workers=True)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    loader.dataset.epoch = epoch
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
stop()
