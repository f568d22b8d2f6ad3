# expect: clean
from pieces import *

dist.init_process_group("gloo")
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
if torch.cuda.is_available():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
model = DistributedDataParallel(net)
stop()
