# expect: gradscaler-diverges
# besides: rank-local-skip
from pieces import *

rank, local, world = start()
net = Net().to(local)
for p in net.parameters():
    dist.broadcast(p.data, 0)
opt = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler()
for _ in range(10):
    opt.zero_grad()
    scaler.scale(F.cross_entropy(net(torch.zeros(4)), torch.zeros(1))).backward()
    scaler.unscale_(opt)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    scaler.step(opt)
    scaler.update()
stop()
