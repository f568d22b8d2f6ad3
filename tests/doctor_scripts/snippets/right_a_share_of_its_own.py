# expect: clean
from pieces import *


class Shard(Pictures):
    def __init__(self, files, rank, world):
        super().__init__(files[rank::world])


rank, local, world = start()
loader = tud.DataLoader(Shard(sorted(os.listdir("a")), rank, world), 64 // world, shuffle=True, drop_last=True)
model = DistributedDataParallel(Net().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
stop()
