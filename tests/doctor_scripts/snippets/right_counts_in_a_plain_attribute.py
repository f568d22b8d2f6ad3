# expect: clean
from pieces import *


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.rows = 0

    def forward(self, x):
        self.rows += len(x)
        self.steps += 1
        return self.fc(x)


rank, local, world = start()
model = DistributedDataParallel(Counted().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
