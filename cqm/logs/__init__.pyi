from .coverage import Coverage as Coverage
from .dataset import Logs as Logs
from .shards import LogWriter as LogWriter, ShardedLogs as ShardedLogs
