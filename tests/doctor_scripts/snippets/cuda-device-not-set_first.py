# expect: cuda-device-not-set
from pieces import *

dist.init_process_group("nccl")
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = DistributedDataParallel(Net().to(device))
stop()
