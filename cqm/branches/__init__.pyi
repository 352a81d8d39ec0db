from .collect import DroppedWarning as DroppedWarning
from .dataset import Branches as Branches
from .dataset import Recipe as Recipe
from .dataset import combine as combine
from .simulate import Policy as Policy
