# expect: static-graph-changes
# besides: rank-dependent-graph
from pieces import *


class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        x = self.one(x)
        if self.seen > 100:
            x = self.two(x)
        return x


rank, local, world = start()
model = DistributedDataParallel(Warm().to(local), static_graph=True)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
