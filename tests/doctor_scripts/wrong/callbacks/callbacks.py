"""What may end a training."""


class StopTraining(Exception):
    pass


class Plateau:
    """Ends training when a score has not improved for a while."""

    def __init__(self, patience):
        self.patience, self.best, self.bad_epochs = patience, None, 0

    def on_epoch_end(self, trainer, score):
        if self.best is None or score > self.best:
            self.best, self.bad_epochs = score, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs >= self.patience:
            trainer.should_stop = True
