from . import (
    bounds as bounds,
    branches as branches,
    decisions as decisions,
    logs as logs,
    measures as measures,
    models as models,
    queries as queries,
    quotient as quotient,
    storage as storage,
    worlds as worlds,
)
from .branches.audit import audit as audit
from .branches.collect import collect as collect
from .branches.dataset import Branches as Branches, combine as combine
from .branches.recipe import Policy as Policy, Recipe as Recipe
from .logs.dataset import Logs as Logs
from .models.effect import EffectModel as EffectModel
from .models.estimator import load_model as load_model
from .models.hindsight import HindsightModel as HindsightModel
from .models.residual import ResidualModel as ResidualModel
from .models.scorer import Scorer as Scorer
from .models.training import Training as Training
from .queries import Query as Query
from .verdicts import Verdict as Verdict
from .worlds.check import check_world as check_world
from .worlds.contract import World as World
from .worlds.function import FunctionWorld as FunctionWorld
from .worlds.gym import GymWorld as GymWorld
from .worlds.loading import load_world as load_world
from .worlds.mujoco import MujocoWorld as MujocoWorld
from .worlds.nuisance import Nuisance as Nuisance

__version__: str
