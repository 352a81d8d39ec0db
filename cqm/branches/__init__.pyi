from . import (
    audit as audit,
    cluster as cluster,
    collect as collect,
    dataset as dataset,
    families as families,
    recipe as recipe,
    shards as shards,
    simulate as simulate,
)
from .collect import DroppedWarning as DroppedWarning
from .dataset import Branches as Branches, combine as combine
from .recipe import Continuation as Continuation, Policy as Policy, Recipe as Recipe
