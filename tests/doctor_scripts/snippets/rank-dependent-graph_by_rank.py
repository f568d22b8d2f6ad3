# expect: rank-dependent-graph
from pieces import *


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        if dist.get_rank() == 0:
            return self.left(x)
        return self.right(x)


rank, local, world = start()
model = DistributedDataParallel(Split().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
