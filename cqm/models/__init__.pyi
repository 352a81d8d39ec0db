from .answers import RewardAnswer as RewardAnswer, WayScore as WayScore
from .averages import AverageEffects as AverageEffects
from .box import BoxDecision as BoxDecision
from .effect import EffectModel as EffectModel
from .estimator import Estimator as Estimator, load_model as load_model
from .hindsight import HindsightModel as HindsightModel
from .projections import LogVerdict as LogVerdict, ProjectedEffects as ProjectedEffects
from .ratios import Reliability as Reliability
from .refutations import Refutation as Refutation, Refutations as Refutations
from .residual import ResidualModel as ResidualModel
from .scorer import Scorer as Scorer
from .selection import Scores as Scores, held_out_scores as held_out_scores
from .training import Training as Training
