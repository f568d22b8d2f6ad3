# expect: clean
from pieces import *

from torchvision import datasets

rank, local, world = start()
if local == 0:
    datasets.CIFAR10("data", download=True)
dist.barrier()
train = datasets.CIFAR10("data", download=False)
held = datasets.CIFAR10("data", train=False, download=rank == 0)
stop()
