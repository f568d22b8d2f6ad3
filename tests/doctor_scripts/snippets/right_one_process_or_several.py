# expect: clean
from pieces import *

def train(options, local):
    device = torch.device("cuda", local)
    model = Net().to(device)
    if options.world > 1:
        model = DistributedDataParallel(model, device_ids=[local])
    model(torch.zeros(2, 4).to(device)).sum().backward()


def entry(rank, options):
    dist.init_process_group("nccl", rank=rank, world_size=options.world, init_method="tcp://localhost:29500")
    train(options, rank)
    stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=1)
    options = parser.parse_args()
    if options.world == 1:
        train(options, 0)
        exit(0)
    for rank in range(options.world):
        torch.multiprocessing.Process(target=entry, args=(rank, options)).start()
