from .coverage import Coverage as Coverage
from .dataset import Logs as Logs
