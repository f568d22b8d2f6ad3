# expect: clean
from pieces import *


def backbone(rank):
    if rank == 0:
        torch.manual_seed(7)
        torch.save(Net().state_dict(), "net.pt")
    dist.barrier()
    net = Net()
    net.load_state_dict(torch.load("net.pt", map_location="cpu"))
    return net


rank, local, world = start()
net = backbone(rank).to(local)
net.head = nn.Linear(net.head.in_features, 3).to(local)
model = DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
