# expect: batchnorm-unsynced
from pieces import *


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        return self.net(x)


rank, local, world = start()
model = DistributedDataParallel(Conv().to(local))
stop()
