# expect: unused-parameters
from pieces import *


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.norm(x))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(3)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


rank, local, world = start()
model = DistributedDataParallel(Whole().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
