# expect: replicas-start-different
from pieces import *


def average(model, world):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
            p.grad.data /= world


rank, local, world = start()
torch.manual_seed(int(os.environ["RANK"]) + 5)
net = Net().to(local)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    F.cross_entropy(net(torch.zeros(4)), torch.zeros(1)).backward()
    average(net, world)
    opt.step()
stop()
