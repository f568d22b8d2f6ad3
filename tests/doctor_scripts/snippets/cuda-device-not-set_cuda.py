# expect: cuda-device-not-set
from pieces import *


def main():
    dist.init_process_group("nccl")
    net = Net().cuda()
    model = DistributedDataParallel(net)
    dist.destroy_process_group()


main()
