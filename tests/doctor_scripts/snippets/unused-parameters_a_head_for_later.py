# expect: unused-parameters
from pieces import *


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Net()
        self.aux_head = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x):
        return self.trunk(x)


rank, local, world = start()
model = DistributedDataParallel(Two().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
