# expect: legacy-data-parallel
import torch
from torch import nn

net = nn.Linear(4, 2)
if torch.cuda.device_count() > 1:
    net = nn.DataParallel(net)
