# expect: clean
from pieces import *


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})

    def forward(self, x, task):
        return self.heads[task](self.body(x))


rank, local, world = start()
model = DistributedDataParallel(Tasks().to(local), find_unused_parameters=True)
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(9):
    opt.zero_grad()
    model(torch.zeros(4), "ab"[step % 2]).sum().backward()
    opt.step()
stop()
