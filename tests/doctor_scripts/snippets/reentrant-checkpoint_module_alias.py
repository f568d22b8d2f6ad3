# expect: reentrant-checkpoint
from pieces import *

from torch.utils import checkpoint as cp


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = cp.checkpoint(block, x, use_reentrant=True)
        return x


rank, local, world = start()
model = DistributedDataParallel(Deep().to(local))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    opt.zero_grad()
    model(torch.zeros(4)).sum().backward()
    opt.step()
stop()
