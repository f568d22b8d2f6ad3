# expect: global-rank-as-device
from pieces import *

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model = DistributedDataParallel(Net().cuda(), device_ids=[dist.get_rank()])
stop()
