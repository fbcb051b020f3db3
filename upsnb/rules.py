"""Rules that hold across the sections of a config, and the names of the loss terms that many of them are about."""

from __future__ import annotations

import difflib

from upsnb.errors import Problem

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
        Problem("optimizer.foreach", "AdamW is either fused or foreach", "switch one of them off"),
    ),
    (
        ("fsdp2", "compile in CUDA graphs"),
        lambda config: (
            config.training.use_fsdp2 and config.training.compile and config.training.compile_mode != "default"
        ),
        Problem(
            "training.compile_mode",
            "FSDP2 gathers weights to other addresses each time, so CUDA graphs would be recorded again for ever",
            "set it to default, or training.use_fsdp2 to false",
        ),
    ),
    (
        ("fsdp2", "bf16_gradients"),
        lambda config: config.training.use_fsdp2 and config.training.bf16_gradients,
        Problem("training.bf16_gradients", "is DDP's, and FSDP2 averages gradients in float32", "set it to false"),
    ),
)
TAKEN = frozenset(  # names that torch's containers of modules use themselves, so that no dataset can have them
    "T_destination add_module apply bfloat16 buffers call_super_init children clear compile cpu cuda double "
    "dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu "
    "items keys load_state_dict modules mtia named_buffers named_children named_modules named_parameters "
    "parameters pop register_backward_hook register_buffer register_forward_hook register_forward_pre_hook "
    "register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook "
    "register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook "
    "register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory state_dict to "
    "to_empty train training type update values xpu zero_grad".split()
)
PHYSICS_TERMS = ("boundary", "conservation", "positivity")  # hold where a family names them among its priors


def contradictions(config) -> list[Problem]:
    """Rules across sections that a config breaks."""
    from upsnb.data import custom  # here, because the table stands a floor above
    from upsnb.data.families import FAMILIES, family_of

    problems = []
    pdet, training, latent, datasets = config.operator.pdet, config.training, config.latent, config.data.datasets
    stages = config.stages.planned

    def require(holds: bool, setting: str, found: str, remedy: str) -> None:
        if not holds:
            problems.append(Problem(setting, found, remedy))

    fields = config.data.workload == type(config.data)().workload
    require(bool(datasets) or not fields, "data.datasets", "is empty", "name at least one dataset")
    remedy = "set data.datasets to {}, and describe them in data.workload_settings"
    require(not datasets or fields, "data.datasets", "are fields, and data.workload brings its own", remedy)
    remedy = "set data.workload, or leave them out"
    require(
        not (config.data.workload_settings and fields),
        "data.workload_settings",
        "are for a workload, and fields have none",
        remedy,
    )
    for name in () if fields else (name for name in stages if name != "operator"):
        require(False, f"stages.{name}.epochs", "is a stage of fields, and data.workload has one alone", "set it to 0")
    for path, width in (
        ("operator.pdet.input_dim", pdet.input_dim),
        ("diffusion.latent_dim", config.diffusion.latent_dim),
    ):
        found = f"is {width} but latent.dim is {latent.dim}"
        require(width in (None, latent.dim), path, found, "make them equal")
    require(
        training.num_gpus % training.num_nodes == 0,
        "training.num_gpus",
        f"{training.num_gpus} ranks on {training.num_nodes} machines",
        "give each machine as many",
    )
    require(
        pdet.hidden_dim % pdet.num_heads == 0 and (pdet.hidden_dim // pdet.num_heads) % 2 == 0,
        "operator.pdet.num_heads",
        f"{pdet.hidden_dim} over {pdet.num_heads} heads",
        "make hidden_dim an even multiple",
    )
    require(
        int(pdet.hidden_dim * pdet.mlp_ratio) > 0,
        "operator.pdet.mlp_ratio",
        f"{pdet.mlp_ratio:g} of a hidden_dim of {pdet.hidden_dim} is no width at all",
        "raise it",
    )
    require(
        latent.dim % 2 == 0
        or not {"perceiver", "cross_attention"} & {config.operator.encoder, config.operator.decoder},
        "latent.dim",
        f"{latent.dim} is odd, and attention in encoder or decoder rotates pairs of channels",
        "make it even",
    )
    require(
        config.data.split.validation_fraction + config.data.split.test_fraction < 1,
        "data.split",
        "validation_fraction and test_fraction leave nothing to train on",
        "lower one of them",
    )
    require(
        config.data.mixing.by != "loss" or config.data.split.validation_fraction > 0,
        "data.mixing.by",
        "loss is that of the last validation, and data.split.validation_fraction is 0",
        "validate on some samples, or mix by something else",
    )
    later, shortest = config.data.mixing.from_epoch, min(getattr(config.stages, name).epochs for name in stages)
    for name, epoch in later.items():
        path = f"data.mixing.from_epoch.{name}"
        require(name in datasets, path, "no dataset has this name", did_you_mean(name, datasets))
        found = f"{epoch}, and a stage ends after {shortest} epochs, so it would never be trained on"
        require(epoch < shortest, path, found, "let it join before")
    require(
        not datasets or any(later.get(name, 0) == 0 for name in datasets),
        "data.mixing.from_epoch",
        "no dataset is there from epoch 0 on",
        "leave one of them out",
    )
    require(
        "consistency_distill" not in stages or "diff_residual" in stages,
        "stages.consistency_distill.epochs",
        "there is no diffusion model to learn from",
        "train stages.diff_residual too",
    )
    chosen = {f"stages.{name}.optimizer": getattr(config.stages, name).optimizer for name in stages}
    for path, optimizer in {"optimizer": config.optimizer, **chosen}.items():
        require(
            not optimizer or optimizer.lr_scaling == "none" or optimizer.lr_reference_batch is not None,
            f"{path}.lr_reference_batch",
            f"is empty, and lr_scaling is {optimizer and optimizer.lr_scaling}",
            "write the pairs of a step (batch_size x accum_steps x ranks) that the learning rates are meant for",
        )
    for name, dataset in datasets.items():
        for setting, *problem in custom.problems(dataset):
            require(False, f"data.datasets.{name}.{setting}", *problem)
    if any(problem.setting.startswith("data.datasets.") for problem in problems):
        return problems  # such a row answers no questions
    rows = {name: family_of(dataset) for name, dataset in datasets.items()}
    for name, dataset in datasets.items():
        family, frames = rows[name], (dataset.input_frames, dataset.output_frames)
        made, known = dataset.generate, ", ".join(family.parameters)
        require(
            made.parameter is None or (len(family.parameters) == 1 and not made.parameters),
            f"data.datasets.{name}.generate.parameter",
            f"{family.name} has {known or 'none'}",
            "leave it empty, and write parameters by name",
        )
        for other in set(made.parameters) - set(family.parameters):
            found = f"{family.name} has no such parameter"
            require(False, f"data.datasets.{name}.generate.parameters.{other}", found, f"it has {known or 'none'}")
        require(
            not dataset.augment or bool(family.symmetries),
            f"data.datasets.{name}.augment",
            f"no symmetry of {family.name} is known",
            "set it to false",
        )
        if not family.time_dependent:
            found = f"is static, but input_frames x output_frames is {frames[0]} x {frames[1]}"
            require(frames == (1, 1), f"data.datasets.{name}", found, "leave both at 1")
        elif config.operator.rollout == "latent" or training.lambda_forward or training.lambda_inv_dec:
            require(
                frames[0] == frames[1],
                f"data.datasets.{name}",
                f"latent rollout, lambda_forward and lambda_inv_dec need input_frames == output_frames, found "
                f"{frames[0]} and {frames[1]}",
                "make them equal",
            )
    for term in (*TIME_TERMS, *PHYSICS_TERMS):
        acting = [name for name, row in FAMILIES.items() if acts(term, row)]
        require(
            getattr(training, f"lambda_{term}") == 0 or any(acts(term, row) for row in rows.values()),
            f"training.lambda_{term}",
            f"acts on {', '.join(acting)} only, and no dataset is one",
            "set it to 0",
        )
    require(
        training.lambda_boundary == 0 or config.operator.walls == "free",
        "training.lambda_boundary",
        "acts on nothing while operator.walls is hard",
        "set it to 0, or the walls to free",
    )
    require(
        training.lambda_boundary == 0 or config.operator.decoder != "unpatchify",
        "training.lambda_boundary",
        "unpatchify repeats its edge values outside the grid",
        "choose another decoder",
    )
    for setting in ("loss_warmup_steps", "loss_frequency"):
        for term in getattr(training, setting):
            hint = did_you_mean(term, LOSS_TERMS)
            require(term in LOSS_TERMS, f"training.{setting}.{term}", "unknown loss term", hint)
    require(
        config.cost.budget is None or config.cost.price_per_hour > 0,
        "cost.budget",
        "nobody said what the machine costs, so it is never spent",
        "set cost.price_per_hour",
    )
    require(
        config.operator.means == "free" or any("conservation" in row.priors for row in rows.values()),
        "operator.means",
        "kept, and no dataset's equation keeps them",
        "set it to free",
    )
    require(
        config.operator.rollout != "latent" or config.operator.means == "free",
        "operator.means",
        "kept by what is added to the last frame, and a latent rollout adds nothing to it",
        "set it to free",
    )
    require(
        config.operator.rollout != "latent" or config.operator.fourier_modes == 0,
        "operator.fourier_modes",
        "is of fields, and a latent rollout decodes what its tokens say and nothing else",
        "set it to 0",
    )
    require(
        config.operator.rollout != "latent" or (training.lambda_forward > 0 and training.lambda_inv_enc > 0),
        "operator.rollout",
        "nothing trains the latent step and its decoding head",
        "latent needs training.lambda_forward > 0 and training.lambda_inv_enc > 0",
    )
    require(
        config.operator.encoder != "perceiver" or config.operator.decoder == "cross_attention",
        "operator.decoder",
        f"{config.operator.decoder} needs tokens that keep their place, and the perceiver's have none",
        "set operator.decoder: cross_attention or operator.encoder: patch",
    )
    require(
        not config.evaluation.symmetry_average
        or any("turn" in row.symmetries and not row.time_dependent for row in rows.values()),
        "evaluation.symmetry_average",
        "averages over the turns of a static problem's box, and no dataset has any",
        "set it to false",
    )
    problems += [problem for _, clash, problem in CONFLICTS if clash(config)]
    active = {term for term in LOSS_TERMS if getattr(training, f"lambda_{term}") > 0}
    require(bool(active), "training", "every loss weight is 0", "give at least one lambda_* a positive weight")
    for name, row in rows.items():
        require(
            not active or any(acts(term, row) for term in active),
            f"data.datasets.{name}",
            f"{', '.join(sorted(active))} act on other families only, so nothing would train on it",
            "give training.lambda_relative a positive weight",
        )
    require(
        training.inverse_loss_frequency == 1
        or any(getattr(training, f"lambda_{t}") > 0 for t in INVERSE_TERMS)
        or not training.loss_frequency.keys() & set(INVERSE_TERMS),
        "training.loss_frequency",
        "inverse terms follow training.inverse_loss_frequency",
        "set that one only",
    )
    return problems


def acts(term: str, row) -> bool:
    """Whether a loss term says anything about a family, or a dataset: there is a time, or its row has this prior."""
    return term in row.priors if term in PHYSICS_TERMS else row.time_dependent or term not in TIME_TERMS


def did_you_mean(name: str, valid) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(valid))}"
