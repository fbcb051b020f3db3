"""Rules that hold across the sections of a config, and the names of the loss terms that many of them are about."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

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
    from upsnb.data.families import family_of  # here, because the table stands a floor above

    problems = [*_kinds_of_data(config), *_sizes(config), *_splits_and_mixing(config), *_stages(config)]
    of_rows = [*_own_rows(config)]
    if of_rows:
        return problems + of_rows  # such a row answers no questions
    rows = {name: family_of(dataset) for name, dataset in config.data.datasets.items()}
    clashes = [problem for _, clash, problem in CONFLICTS if clash(config)]
    return [*problems, *_datasets(config, rows), *_losses(config, rows), *_forecasts(config, rows), *clashes]


def _kinds_of_data(config) -> Iterator[Problem]:
    """Fields have datasets, and a workload brings its own."""
    if config.data.workload == type(config.data)().workload:  # fields
        if not config.data.datasets:
            yield Problem("data.datasets", "is empty", "name at least one dataset")
        if config.data.workload_settings:
            found = "are for a workload, and fields have none"
            yield Problem("data.workload_settings", found, "set data.workload, or leave them out")
        return
    if config.data.datasets:
        remedy = "set data.datasets to {}, and describe them in data.workload_settings"
        yield Problem("data.datasets", "are fields, and data.workload brings its own", remedy)
    for name in config.stages.planned:
        if name != "operator":
            found = "is a stage of fields, and data.workload has one alone"
            yield Problem(f"stages.{name}.epochs", found, "set it to 0")


def _sizes(config) -> Iterator[Problem]:
    """Widths, depths and ranks that have to divide or equal each other."""
    operator, latent, diffusion, training = config.operator, config.latent, config.diffusion, config.training
    pdet = operator.pdet
    for path, width in (
        ("operator.pdet.input_dim", pdet.input_dim),
        ("diffusion.latent_dim", diffusion.latent_dim),
    ):
        if width not in (None, latent.dim):
            yield Problem(path, f"is {width} but latent.dim is {latent.dim}", "make them equal")
    if training.num_gpus % training.num_nodes:
        found = f"{training.num_gpus} ranks on {training.num_nodes} machines"
        yield Problem("training.num_gpus", found, "give each machine as many")
    if pdet.hidden_dim % (2 * pdet.num_heads):
        found = f"{pdet.hidden_dim} over {pdet.num_heads} heads"
        yield Problem("operator.pdet.num_heads", found, "make hidden_dim an even multiple")
    if diffusion.depth and diffusion.depth > pdet.depth:
        found = f"{diffusion.depth}, and operator.pdet.depth is {pdet.depth}"
        yield Problem("diffusion.depth", found, "make it no larger, or leave it empty")
    if int(pdet.hidden_dim * pdet.mlp_ratio) == 0:
        found = f"{pdet.mlp_ratio:g} of a hidden_dim of {pdet.hidden_dim} is no width at all"
        yield Problem("operator.pdet.mlp_ratio", found, "raise it")
    if latent.dim % 2 and (operator.encoder == "perceiver" or operator.decoder == "cross_attention"):
        found = f"{latent.dim} is odd, and attention in encoder or decoder rotates pairs of channels"
        yield Problem("latent.dim", found, "make it even")


def _splits_and_mixing(config) -> Iterator[Problem]:
    """Something is left to train on, in every epoch of every stage."""
    datasets, split, mixing = config.data.datasets, config.data.split, config.data.mixing
    if split.validation_fraction + split.test_fraction >= 1:
        found = "validation_fraction and test_fraction leave nothing to train on"
        yield Problem("data.split", found, "lower one of them")
    if mixing.by == "loss" and split.validation_fraction == 0:
        found = "loss is that of the last validation, and data.split.validation_fraction is 0"
        yield Problem("data.mixing.by", found, "validate on some samples, or mix by something else")
    shortest = min(getattr(config.stages, name).epochs for name in config.stages.planned)
    for name, epoch in mixing.from_epoch.items():
        path = f"data.mixing.from_epoch.{name}"
        if name not in datasets:
            yield Problem(path, "no dataset has this name", did_you_mean(name, datasets))
        if epoch >= shortest:
            found = f"{epoch}, and a stage ends after {shortest} epochs, so it would never be trained on"
            yield Problem(path, found, "let it join before")
    if datasets and all(mixing.from_epoch.get(name, 0) > 0 for name in datasets):
        yield Problem("data.mixing.from_epoch", "no dataset is there from epoch 0 on", "leave one of them out")


def _stages(config) -> Iterator[Problem]:
    """A student has a teacher, a learning rate that scales a batch to scale from, and a budget a price."""
    stages = config.stages.planned
    if "consistency_distill" in stages and "diff_residual" not in stages:
        found = "there is no diffusion model to learn from"
        yield Problem("stages.consistency_distill.epochs", found, "train stages.diff_residual too")
    chosen = {f"stages.{name}.optimizer": getattr(config.stages, name).optimizer for name in stages}
    remedy = "write the pairs of a step (batch_size x accum_steps x ranks) that the learning rates are meant for"
    for path, optimizer in {"optimizer": config.optimizer, **chosen}.items():
        if optimizer and optimizer.lr_scaling != "none" and optimizer.lr_reference_batch is None:
            yield Problem(f"{path}.lr_reference_batch", f"is empty, and lr_scaling is {optimizer.lr_scaling}", remedy)
    if config.cost.budget is not None and config.cost.price_per_hour == 0:
        found = "nobody said what the machine costs, so it is never spent"
        yield Problem("cost.budget", found, "set cost.price_per_hour")


def _own_rows(config) -> Iterator[Problem]:
    """Rows that describe somebody's own arrays."""
    from upsnb.data import custom

    for name, dataset in config.data.datasets.items():
        for setting, *problem in custom.problems(dataset):
            yield Problem(f"data.datasets.{name}.{setting}", *problem)


def _datasets(config, rows: Mapping) -> Iterator[Problem]:
    """What is asked of a dataset is what its family has: parameters, symmetries, time."""
    operator, training = config.operator, config.training
    for name, dataset in config.data.datasets.items():
        path, family, frames = f"data.datasets.{name}", rows[name], (dataset.input_frames, dataset.output_frames)
        made, known = dataset.generate, ", ".join(family.parameters) or "none"
        if made.parameter is not None and (len(family.parameters) != 1 or made.parameters):
            remedy = "leave it empty, and write parameters by name"
            yield Problem(f"{path}.generate.parameter", f"{family.name} has {known}", remedy)
        for other in set(made.parameters) - set(family.parameters):
            found = f"{family.name} has no such parameter"
            yield Problem(f"{path}.generate.parameters.{other}", found, f"it has {known}")
        if dataset.augment and not family.symmetries:
            yield Problem(f"{path}.augment", f"no symmetry of {family.name} is known", "set it to false")
        if not family.time_dependent:
            if frames != (1, 1):
                found = f"is static, but input_frames x output_frames is {frames[0]} x {frames[1]}"
                yield Problem(path, found, "leave both at 1")
        elif operator.rollout == "latent" or training.lambda_forward or training.lambda_inv_dec:
            if frames[0] != frames[1]:
                found = "latent rollout, lambda_forward and lambda_inv_dec need input_frames == output_frames, found "
                yield Problem(path, f"{found}{frames[0]} and {frames[1]}", "make them equal")


def _losses(config, rows: Mapping) -> Iterator[Problem]:
    """Every loss term acts on something, and every dataset is acted on by one."""
    from upsnb.data.families import FAMILIES

    operator, training = config.operator, config.training
    for term in (*TIME_TERMS, *PHYSICS_TERMS):
        if getattr(training, f"lambda_{term}") and not any(acts(term, row) for row in rows.values()):
            acting = ", ".join(name for name, row in FAMILIES.items() if acts(term, row))
            yield Problem(f"training.lambda_{term}", f"acts on {acting} only, and no dataset is one", "set it to 0")
    if training.lambda_boundary and operator.walls == "hard":
        found = "acts on nothing while operator.walls is hard"
        yield Problem("training.lambda_boundary", found, "set it to 0, or the walls to free")
    if training.lambda_boundary and operator.decoder == "unpatchify":
        found = "unpatchify repeats its edge values outside the grid"
        yield Problem("training.lambda_boundary", found, "choose another decoder")
    for setting in ("loss_warmup_steps", "loss_frequency"):
        for term in getattr(training, setting):
            if term not in LOSS_TERMS:
                yield Problem(f"training.{setting}.{term}", "unknown loss term", did_you_mean(term, LOSS_TERMS))
    for term in training.loss_frequency.keys() & {*INVERSE_TERMS}:
        found = "acts on nothing: inverse terms follow training.inverse_loss_frequency"
        yield Problem(f"training.loss_frequency.{term}", found, "set that one")
    active = {term for term in LOSS_TERMS if getattr(training, f"lambda_{term}") > 0}
    if not active:
        yield Problem("training", "every loss weight is 0", "give at least one lambda_* a positive weight")
    for name, row in rows.items():
        if active and not any(acts(term, row) for term in active):
            found = f"{', '.join(sorted(active))} act on other families only, so nothing would train on it"
            yield Problem(f"data.datasets.{name}", found, "give training.lambda_relative a positive weight")


def _forecasts(config, rows: Mapping) -> Iterator[Problem]:
    """What the model adds, keeps and averages is what its parts and its data allow."""
    operator, training = config.operator, config.training
    if operator.means == "kept" and not any("conservation" in row.priors for row in rows.values()):
        yield Problem("operator.means", "kept, and no dataset's equation keeps them", "set it to free")
    if operator.rollout == "latent":
        if operator.means == "kept":
            found = "kept by what is added to the last frame, and a latent rollout adds nothing to it"
            yield Problem("operator.means", found, "set it to free")
        if operator.fourier_modes > 0:
            found = "is of fields, and a latent rollout decodes what its tokens say and nothing else"
            yield Problem("operator.fourier_modes", found, "set it to 0")
        if training.lambda_forward == 0 or training.lambda_inv_enc == 0:
            remedy = "latent needs training.lambda_forward > 0 and training.lambda_inv_enc > 0"
            yield Problem("operator.rollout", "nothing trains the latent step and its decoding head", remedy)
    if operator.encoder == "perceiver" and operator.decoder != "cross_attention":
        found = f"{operator.decoder} needs tokens that keep their place, and the perceiver's have none"
        yield Problem("operator.decoder", found, "set operator.decoder: cross_attention or operator.encoder: patch")
    can_turn = any("turn" in row.symmetries and not row.time_dependent for row in rows.values())
    if config.evaluation.symmetry_average and not can_turn:
        found = "averages over the turns of a static problem's box, and no dataset has any"
        yield Problem("evaluation.symmetry_average", found, "set it to false")


def acts(term: str, row) -> bool:
    """Whether a loss term says anything about a family, or a dataset: there is a time, or its row has this prior."""
    return term in row.priors if term in PHYSICS_TERMS else row.time_dependent or term not in TIME_TERMS


def did_you_mean(name: str, valid) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(valid))}"
