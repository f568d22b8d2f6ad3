# expect: clean
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
net = nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), shuffle=True)
net, opt, loader = accelerator.prepare(net, opt, loader)
for epoch in range(3):
    for (x,) in loader:
        opt.zero_grad()
        accelerator.backward(net(x).sum())
        opt.step()
        accelerator.print(epoch)
