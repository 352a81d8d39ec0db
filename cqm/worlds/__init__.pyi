from . import (
    catalogue as catalogue,
    check as check,
    cloning as cloning,
    contract as contract,
    features as features,
    function as function,
    gym as gym,
    mujoco as mujoco,
    nuisance as nuisance,
    suite as suite,
)
from .check import Report as Report, check_world as check_world
from .contract import (
    NoiseKind as NoiseKind,
    Rollout as Rollout,
    States as States,
    Status as Status,
    World as World,
)
from .features import (
    ExpandedWorld as ExpandedWorld,
    Products as Products,
    RandomFourier as RandomFourier,
    Squares as Squares,
    UserFeatures as UserFeatures,
)
from .function import FunctionWorld as FunctionWorld
from .gym import GymWorld as GymWorld
from .loading import load_world as load_world, reload_world as reload_world
from .mujoco import MujocoWorld as MujocoWorld
from .nuisance import Nuisance as Nuisance, NuisanceWorld as NuisanceWorld
