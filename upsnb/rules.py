"""Rules that hold across the sections of a config, and the names of the loss terms that many of them are about."""

from __future__ import annotations

import difflib

LOSS_TERMS = (
    "relative",  # relative L2 of the predicted fields, the metric's own shape
    "field",  # mean squared error of the predicted fields at the queried points
    "forward",  # predicted latent against the encoded true future (UPT's latent-rollout target)
    "inv_enc",  # encode, decode: the input fields must come back
    "inv_dec",  # decode, encode: the predicted latent must come back
    "spectral",  # amplitude error per wavenumber, FFT over space
    "rollout",  # error of a second, self-fed call
    "boundary",  # physics: the dataset's boundary condition
    "conservation",  # physics: the spatial mean that the equation keeps
    "positivity",  # physics: values that cannot be negative
    "latent_norm",  # latents of unit variance
    "latent_diversity",  # tokens of one sample that do not collapse onto each other
)
INVERSE_TERMS = ("inv_enc", "inv_dec")
TIME_TERMS = ("forward", "inv_dec", "rollout")  # need a next state of the same kind
CONFLICTS = (  # settings that exclude each other: names, when, what to say
    (
        ("fused", "foreach"),
        lambda config: config.optimizer.fused and config.optimizer.foreach,
        "optimizer.foreach: AdamW is either fused or foreach -> switch one of them off",
    ),
)
PHYSICS_TERMS = ("boundary", "conservation", "positivity")  # hold where a family names them among its priors


def contradictions(config) -> list[str]:
    """Rules across sections, each broken one as a sentence that starts with the setting's path."""
    from upsnb.data.families import FAMILIES  # here, because the table stands a floor above

    problems = []
    pdet, training, latent = config.operator.pdet, config.training, config.latent

    def require(holds: bool, sentence: str) -> None:
        if not holds:
            problems.append(sentence)

    require(bool(config.data.datasets), "data.datasets: is empty -> name at least one dataset")
    require(
        pdet.input_dim in (None, latent.dim),
        f"operator.pdet.input_dim: is {pdet.input_dim} but latent.dim is {latent.dim} -> make them equal",
    )
    require(
        config.diffusion.latent_dim in (None, latent.dim),
        f"diffusion.latent_dim: is {config.diffusion.latent_dim} but latent.dim is {latent.dim} -> make them equal",
    )
    require(
        pdet.hidden_dim % pdet.num_heads == 0 and (pdet.hidden_dim // pdet.num_heads) % 2 == 0,
        f"operator.pdet.num_heads: {pdet.hidden_dim} over {pdet.num_heads} heads -> make hidden_dim an even multiple",
    )
    for name, dataset in config.data.datasets.items():
        family = FAMILIES[dataset.family]
        require(
            not dataset.augment or family.symmetries is not None,
            f"data.datasets.{name}.augment: no symmetry of {family.name} is known -> set it to false",
        )
        if not family.time_dependent:
            require(
                dataset.input_frames == dataset.output_frames == 1,
                f"data.datasets.{name}: is static, but input_frames x output_frames is "
                f"{dataset.input_frames} x {dataset.output_frames} -> leave both at 1",
            )
        elif config.operator.rollout == "latent" or training.lambda_forward or training.lambda_inv_dec:
            require(
                dataset.input_frames == dataset.output_frames,
                f"data.datasets.{name}: latent rollout, lambda_forward and lambda_inv_dec need "
                f"input_frames == output_frames, found {dataset.input_frames} and {dataset.output_frames}",
            )
    families = {dataset.family for dataset in config.data.datasets.values()}
    acting_on = {term: [name for name, row in FAMILIES.items() if row.time_dependent] for term in TIME_TERMS}
    acting_on |= {term: [name for name, row in FAMILIES.items() if term in row.priors] for term in PHYSICS_TERMS}
    for term, acting in acting_on.items():
        require(
            getattr(training, f"lambda_{term}") == 0 or bool(families & set(acting)),
            f"training.lambda_{term}: acts on {', '.join(acting)} only, and no dataset is one -> set it to 0",
        )
    require(
        training.lambda_boundary == 0 or config.operator.walls == "free",
        "training.lambda_boundary: acts on nothing while operator.walls is hard -> set it to 0, or the walls to free",
    )
    require(
        training.lambda_boundary == 0 or config.operator.decoder != "unpatchify",
        "training.lambda_boundary: unpatchify repeats its edge values outside the grid -> choose another decoder",
    )
    for setting in ("loss_warmup_steps", "loss_frequency"):
        for term in getattr(training, setting):
            require(
                term in LOSS_TERMS,
                f"training.{setting}.{term}: unknown loss term -> {did_you_mean(term, LOSS_TERMS)}",
            )
    if config.operator.rollout == "latent":
        require(
            training.lambda_forward > 0 and training.lambda_inv_enc > 0,
            "operator.rollout: latent needs training.lambda_forward > 0 and training.lambda_inv_enc > 0, "
            "otherwise nothing trains the latent step and its decoding head",
        )
    if config.operator.encoder == "perceiver":
        require(
            config.operator.decoder == "cross_attention",
            f"operator.decoder: {config.operator.decoder} needs tokens that keep their place, and the perceiver's have "
            "none -> set operator.decoder: cross_attention or operator.encoder: patch",
        )
    if config.evaluation.symmetry_average:
        require(
            any(FAMILIES[name].symmetries == "square" for name in families),
            "evaluation.symmetry_average: averages over the square's symmetries, and no dataset is a square problem",
        )
    for _, clash, sentence in CONFLICTS:
        require(not clash(config), sentence)
    active = {term for term in LOSS_TERMS if getattr(training, f"lambda_{term}") > 0}
    require(bool(active), "training: every loss weight is 0 -> give at least one lambda_* a positive weight")
    for name, dataset in config.data.datasets.items():
        idle = {term for term, families in acting_on.items() if dataset.family not in families}
        require(
            not active or bool(active - idle),
            f"data.datasets.{name}: {', '.join(sorted(active))} act on other families only, so nothing would train on "
            "it -> give training.lambda_relative a positive weight",
        )
    require(
        training.inverse_loss_frequency == 1
        or any(getattr(training, f"lambda_{t}") > 0 for t in INVERSE_TERMS)
        or not training.loss_frequency.keys() & set(INVERSE_TERMS),
        "training.loss_frequency: inverse terms follow training.inverse_loss_frequency -> set that one only",
    )
    return problems


def did_you_mean(name: str, valid) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(valid))}"
