# expect: rank-conditional-ddp-forward
from pieces import *


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.fc(x))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    return sum(model(x).sum().item() for x, _ in loader)


def main():
    rank, local, world = start()
    model = DistributedDataParallel(Normed().to(local))
    loader = tud.DataLoader(Pictures([]), 4)
    if rank == 0:
        print(evaluate(model, loader))
    stop()


main()
