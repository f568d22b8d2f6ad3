# expect: syncbn-on-cpu
from pieces import *

dist.init_process_group("gloo")
net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
model = DistributedDataParallel(net)
stop()
