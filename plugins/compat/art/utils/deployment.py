"""ART's deployment of a checkpoint at a hosting service. Each name raises NotImplementedError, which names our way."""

from art_compat.refused import DEPLOY, refused

deploy_model = refused("deploy_model", DEPLOY)
deploy_wandb = refused("deploy_wandb", DEPLOY)
TogetherDeploymentConfig = refused("TogetherDeploymentConfig", DEPLOY)
WandbDeploymentConfig = refused("WandbDeploymentConfig", DEPLOY)
