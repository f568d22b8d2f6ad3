# expect: not-distributed
from pieces import *

rank, local, world = start()
data = Pictures(sorted(os.listdir("a")))
sampler = DistributedSampler(data)
net = Net().to(local)
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in tud.DataLoader(data, 4, sampler=sampler):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
stop()
