# expect: static-graph-changes
# besides: rank-dependent-graph
from pieces import *


class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if random.random() > 0.1:
                x = layer(x)
        return x


rank, local, world = start()
model = DistributedDataParallel(Drop().to(local), static_graph=True)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
