# expect: download-on-all-ranks
from pieces import *

from torchvision import datasets

rank, local, world = start()
train = datasets.CIFAR10("data", train=True, download=True)
stop()
