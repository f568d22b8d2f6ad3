# expect: group-not-destroyed
from pieces import *


def main():
    rank, local, world = start()
    model = DistributedDataParallel(Net().to(local))


main()
